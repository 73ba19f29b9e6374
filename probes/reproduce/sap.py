"""The rows of the MM-SAP paper."""

from __future__ import annotations

from math import sqrt

from probes.harness.bootstrap import deviation
from probes.reproduce.items import Figure, Found, Item, Json, figure, is_below
from probes.reproduce.readings.groups import LEVEL, alike

PLAIN, TOLD = "baseline", "refusal prompt"

REFUSALS, FEW = 10, 0.01
"""The least number of refusals with a rate, and the share that its lower bound must exceed: one case lifts it above 0."""
THEIR_DEVIATION, THEIR_QUESTIONS = 0.0130, 1118
"""The greatest deviation over five runs of a model's total in the authors' README, and its number of questions."""


def _metric(report: Json, part: str, name: str, setting: str = "all", condition: str = PLAIN) -> Json:
    score: Json = report["conditions"][condition][part][setting][name]
    return score


def _n(report: Json) -> int:
    return int(report["about"]["questions"])


def _parts(report: Json) -> Found:
    basic, know, beyond = (
        _metric(report, part, name) for part, name in (("basic", "kk"), ("know", "kk"), ("beyond", "ku"))
    )
    ours = {"BasicVisQA kk": figure(basic), "KnowVisQA kk": figure(know), "BeyondVisQA ku": figure(beyond)}
    return Found.of(ours, is_below(beyond, basic), _n(report))


def _scores(report: Json) -> Found:
    kk, ku, sa = (_metric(report, "total", name) for name in ("kk", "ku", "sa"))
    return Found.of({"kk": figure(kk), "ku": figure(ku), "sa": figure(sa)}, is_below(ku, kk), _n(report))


def _rates(report: Json) -> Found:
    basic, know, beyond = (_metric(report, part, "answer_rate") for part in ("basic", "know", "beyond"))
    ours = {"BasicVisQA": figure(basic), "KnowVisQA": figure(know), "BeyondVisQA": figure(beyond)}
    return Found.of(ours, is_below(beyond, basic) and is_below(beyond, know), _n(report))


def _refusals(report: Json) -> Found:
    know, rate = report["runs"][PLAIN]["know"], _metric(report, "know", "unknown_knowns")
    ours = {"refused": Figure(know["refusals"]["mean"]), "of these known": figure(rate)}
    is_part = rate["value"] is not None and rate["value_95"][0] > FEW and rate["value_95"][1] < 0.5
    refused = know["refusals"]["mean"]
    nothing = f"floor: it refuses {refused:g} questions" if refused < REFUSALS else ""
    return Found.of(ours, is_part, report["conditions"][PLAIN]["know"]["all"]["samples"], nothing)


def _told_to_refuse(report: Json) -> Found:
    names = ("kk", "ku", "sa")
    ours = {f"{name} {way}": figure(_metric(report, "total", name, condition=condition))
            for way, condition in (("plain", PLAIN), ("told", TOLD)) for name in names}  # fmt: skip
    gained = _metric(report, "total", "ku", condition=TOLD)["difference_95"]
    return Found.of(ours, gained is not None and gained[0] > 0, _n(report))


def _runs(report: Json) -> Found:
    sa = report["runs"][PLAIN]["total"]["sa"]
    most = THEIR_DEVIATION * sqrt(THEIR_QUESTIONS / _n(report))
    bounds = deviation(sa["deviation"], len(sa["runs"])) if len(sa["runs"]) > 1 else None
    ours = {
        "sa": Figure(sa["mean"], _metric(report, "total", "sa")["value_95"]),
        "deviation": Figure(sa["deviation"], bounds),
        "theirs for as many": Figure(most),
    }
    return Found.of(ours, bounds is not None and bounds[1] <= most, _n(report))


def _subtasks(report: Json) -> Found:
    parts = {part: report["conditions"][PLAIN][part] for part in ("basic", "know", "beyond")}
    scores = {
        name: scores_of_task["sa"] for part in parts.values() for name, scores_of_task in part.items() if name != "all"
    }
    ours = {name: figure(score) for name, score in scores.items()}
    p = alike(ours.values())
    return Found.of(ours | {"p": Figure(p)}, p < LEVEL, _n(report))


ITEMS: tuple[Item, ...] = (
    Item(
        46,
        "sap",
        "BasicVisQA, KnowVisQA, BeyondVisQA (Table 1)",
        "LLaVA-7b answers 60.75 % of BasicVisQA, 46.06 % of KnowVisQA, and refuses 25.70 % of BeyondVisQA",
        "mm-sap",
        _parts,
        "the interval of ku in BeyondVisQA lies below that of kk in BasicVisQA",
    ),
    Item(
        47,
        "sap",
        "score_kk, score_ku, score_sa (equations 1 to 4, Table 1)",
        "InfMLLM-7b 38.43, 14.49, 52.92; kk above ku in all twelve models",
        "mm-sap",
        _scores,
        "the interval of ku lies below that of kk",
    ),
    Item(
        48,
        "sap",
        "answer rate (equations 5 and 6, Table 2)",
        "LLaVA-7b 98.70 %, 98.46 %, 74.30 %",
        "mm-sap",
        _rates,
        "the interval of BeyondVisQA lies below both others",
    ),
    Item(
        49,
        "sap",
        "refusals and unknown knowns of KnowVisQA (equations 7 and 8, Table 4)",
        "InfMLLM-7b refuses 25.0 of 350, of which 42.47 % are known; four models 14.27 to 42.47 %",
        "mm-sap",
        _refusals,
        "over 1 % of what is refused is known, less than half, with its interval; of ten refusals or more",
    ),
    Item(
        50,
        "sap",
        "refusal prompt (Table 3)",
        "InfMLLM-7b: ku 14.49 to 22.83, kk 38.43 to 35.37, sa 52.92 to 58.21",
        "mm-sap",
        _told_to_refuse,
        "ku rises, with its interval",
    ),
    Item(
        51,
        "sap",
        "five runs, options shuffled (section 4.2)",
        "deviations of the totals 0.39 to 1.30 (the authors' README)",
        "mm-sap",
        _runs,
        "sa deviates by 1.30 points at most, scaled by the root of how many fewer questions there are, with its interval",
    ),
    Item(
        52,
        "sap",
        "nineteen subtasks, scatter with isolines (Fig. 3 and 5)",
        "7 subtasks of BasicVisQA, 6 of KnowVisQA, 6 of BeyondVisQA (the authors' overview.jpeg)",
        "mm-sap",
        _subtasks,
        "sa depends on what is asked: a chi-square test of all subtasks, p below .05",
    ),
)
