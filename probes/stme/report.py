"""The report of `helmsight eval stme`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from probes.answering.versions import in_words
from probes.harness.comparison import BASELINE
from probes.harness.comparison_tables import READING, power, table
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured
from probes.stme.evaluate import SAMPLES

MARKED = 0.1
"""The share of a picture's patches that is marked, the strongest ones (figure 6)."""
NAMES = {"lnd": "LND", "m_lnd": "M-LND", "mc_lnd": "MC-LND"}
ABOUT = """\
Of several pictures one, the target, holds the answer. The *focused* picture is the one that question and answer attended to
most, over the last N layers: by the largest single attention factor (LND), by the mean (M-LND), or in most layers (MC-LND).
*Attention accuracy* is the share of right answers whose focused picture is the target; a right answer that looks elsewhere
is an *implicit misunderstanding* (IVM). Where metric and N are the best of all, they were picked by the same answers, as
the paper does; *halves* picks them on one half of the answers and measures on the other."""

Json = Mapping[str, Any]


def report(about: Json, found: Json, more: Json, picture: Image.Image | None = None) -> Report:
    """Return the report of a run.

    `about` describes the run, `found` is the result of `compare`, `more` that of `findings`; `picture` is the one whose
    patches are marked.
    """
    page = Report(f"Attention accuracy of {about['model']}")
    page.facts({
        "Data": about["data"], "Left out": about["left_out"] or None,
        "Not shuffled, because the texts between their pictures differ": about["not_shuffled"] or None,
        "Answers are right by": f"{about['scoring']} matching", "Model": about["model"],
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    page.text(ABOUT)
    if "attention" not in more:
        page.text("What answered has no diagnostics, so nothing is known of where it looked.")
    _conditions(page, found, measured="attention" in more)
    if "attention" in more:
        _attention(page, more)
        _layers(page, more)
        _cases(page, more["cases"])
        if picture is not None:
            _patches(page, more["patches"], picture)
    _controls(page, more)
    return page


def _conditions(page: Report, found: Json, measured: bool) -> None:
    page.heading("Answers and attention")
    if len(found) > 1:
        page.text(READING)
        power(page, found, SAMPLES, "answers", "samples")
    columns = {
        "answers right": "answers",
        "published matching": "answers_published",
        "robust matching": "answers_robust",
    }
    looks = {
        "attention accuracy": "attention", "by LND": "attention_lnd", "by MC-LND": "attention_mc_lnd",
        "of wrong answers": "attention_wrong", "IVM": "ivm",
    }  # fmt: skip
    if measured:
        page.text(
            "Attention by the model's own N (that of its `focus` readout), M-LND unless another metric is named; IVM of all "
            "samples."
        )
    table(page, found, SAMPLES, columns | looks if measured else columns, list(found[BASELINE][SAMPLES]))


def _attention(page: Report, more: Json) -> None:
    page.heading("By the number of layers")
    plain = more["attention"][BASELINE]
    rows = []
    for name, own in more["attention"].items():
        for setting, one in own.items():
            for answers in ("right", "wrong"):
                if best := one[answers].get("best"):
                    halves = one[answers].get("halves")
                    rows.append((
                        name, setting, answers, one[answers]["n"], f"{NAMES[best['metric']]}-{best['layers']}",
                        _share(best), halves and _share(halves), *one[answers]["by_metric"].values(),
                    ))  # fmt: skip
    page.table(("condition", "setting", "answers", "n", "best", "attention accuracy", "halves", *NAMES.values()), rows)
    for setting, one in list(plain.items())[len(plain) > 2 :]:
        if curves := one["right"].get("curves"):
            layers = list(range(1, len(next(iter(curves.values()))) + 1))
            figure = plots.curves(
                layers, {NAMES[name]: values for name, values in curves.items()},
                xlabel="N, last layers", ylabel="attention accuracy (share of right answers)",
            )  # fmt: skip
            page.plot(
                f"layers-{setting}", figure, f"Attention accuracy by the last N layers, {setting} samples, baseline"
            )
    page.heading("Four quadrants", 3)
    kinds = ("right_target", "right_other", "wrong_target", "wrong_other")
    page.table(
        ("setting", "by", "right, target", "right, elsewhere (IVM)", "wrong, target", "wrong, elsewhere"),
        [
            (setting, f"{NAMES[four['metric']]}-{four['layers']}", *(four[kind] for kind in kinds))
            for setting, one in plain.items()
            for four in (one["quadrants"], one["quadrants_best"])
        ],
    )
    page.heading("By task", 3)
    metrics = {
        "answers right": "answers",
        "attention accuracy": "attention",
        "of wrong answers": "attention_wrong",
        "IVM": "ivm",
    }
    tasks = {name: one for name, one in more["tasks"].items() if name != "all"}
    page.table(
        ("task", "n", *metrics),
        [
            (name, one["samples"], *(Measured(one[key]["value"], one[key]["value_95"]) for key in metrics.values()))
            for name, one in tasks.items()
        ],
    )


def _layers(page: Report, more: Json) -> None:
    page.heading("Layer by layer")
    page.text(
        "How much of the look is at the target: its part in the attention factors of all pictures, over its part where all "
        "got the same. 1 is an even look."
    )
    series = {
        f"{setting}, {answers}": one[answers]
        for setting, one in more["convergence"].items()
        for answers in ("right", "wrong")
        if one[answers] and setting != "all"
    }
    if series:
        layers = list(range(len(next(iter(series.values())))))
        figure = plots.curves(layers, series, xlabel="layer", ylabel="look at the target (1: even)")
        page.plot(
            "convergence", figure, "How much of the look is at the target, by layer, of right and of wrong answers"
        )
    rises = {setting: one["rise"] for setting, one in more["convergence"].items() if "rise" in one}
    page.table(
        ("setting", "n", "more in the last third of the layers than in the first, right answers"),
        [(setting, one["n"], Measured(one["value"], one["value_95"], signed=True)) for setting, one in rises.items()],
    )


def _cases(page: Report, cases: Sequence[Json]) -> None:
    for number, case in enumerate(cases, 1):
        marks = {case["target"]: "target"}
        if case["focused"] not in marks:
            marks[case["focused"]] = "focused"
        totals = [sum(row) or 1.0 for row in case["sigma"]]
        shares = [[value / total for value in row] for row, total in zip(case["sigma"], totals, strict=True)]
        figure = plots.heat(shares, xlabel="picture", ylabel="layer", label="part of the factors", marks=marks)
        page.plot(
            f"case-{number}", figure,
            f"A right answer that looks {case['case']} ({case['sample']}): attention factor by layer and picture. "
            f"{case['question']} {case['answer']}",
        )  # fmt: skip


def _patches(page: Report, found: Json, picture: Image.Image) -> None:
    page.heading("Within the target")
    if found["n"]:
        up = found["rise"]
        page.text(
            f"Of {found['n']} right answers on the target: how much of the look at it is where in it the answer is (1: as "
            f"much as anywhere); in the last third of the layers {_share(up, signed=True)} more than in the first. Of the "
            f"token activation maps of what is said: {_share(found['said'])}."
        )
        figure = plots.curves(
            list(range(len(found["on_spot"]))), {"where the answer is": found["on_spot"]},
            xlabel="layer", ylabel="look at the place (1: even)",
        )  # fmt: skip
        page.plot("spot", figure, "How much of the look at the target is where in it the answer is, by layer")
    rho = np.array(found["case"]["rho"])
    count, shape = max(1, round(MARKED * rho.shape[1])), found["case"]["grid"]
    panels = {}
    for layer in sorted({0, len(rho) // 2, len(rho) - 1}):
        cells = np.zeros(rho.shape[1], bool)
        cells[np.argsort(-rho[layer], kind="stable")[:count]] = True
        panels[f"layer {layer}"] = cells.reshape(shape)
    page.plot(
        "patches",
        plots.marked(picture, panels),
        f"The strongest {MARKED:.0%} of the patches ({found['case']['sample']})",
    )


def _controls(page: Report, more: Json) -> None:
    if "shuffles" in more:
        _shuffles(page, more)
    page.heading("Asked for the picture, and asked blind")
    page.text(
        "*named*: asked for the numbers of the pictures that the answer rests on, the answer names the target. *blind*: "
        "asked without pictures, the answer is right."
    )
    page.table(
        ("setting", "n", "named", "blind"),
        [
            (setting, one["samples"], *(_share(more[part][setting]["share"]) for part in ("which", "blind")))
            for setting, one in more["which"].items()
        ],
    )
    if needed := more.get("unseen_needed"):
        best = needed["attention"].get("best")
        page.text(
            f"Of the {needed['answers']['n']} samples that are not answered right without pictures, "
            f"{_share(needed['answers'])} are answered right with them, attention accuracy {_share(best) if best else '-'}."
        )
    if "hidden" in more:
        page.heading("One picture hidden")
        page.text(
            "A gray picture in the place of the focused one, and in the place of another one: the share of answers that "
            "change. The other one is the target where that is not the focused one, else it is drawn. What an answer rests "
            "on should change it: where an answer looks elsewhere, and it is the target that changes it, the look misled "
            "and the answer was no misunderstanding."
        )
        page.table(
            ("answers", "n", "the focused one", "the other one", "more"),
            [
                (name, one["samples"], _share(one["focused"]), _share(one["other"]), _share(one["more"], signed=True))
                for name, one in more["hidden"].items()
            ],
        )
    if more.get("anchor", {}).get("samples"):
        _anchor(page, more["anchor"])
    if more.get("needles", {}).get("found"):
        page.heading("Needles that were found")
        own, best = more["needles"], more["needles"]["best"]
        page.text(
            f"{own['found']} of {own['samples']} answers to a needle's question are right or read other digits off a "
            f"picture; attention accuracy of these {_share(best)} by {NAMES[best['metric']]}-{best['layers']}, "
            f"{_share(own['own'])} by the model's own metric."
        )


def _shuffles(page: Report, more: Json) -> None:
    page.heading("Other orders of the pictures")
    names = {
        "answers": "answers right", "attention_best": "attention, best metric and N of each order",
        "attention": "attention, the model's own",
    }  # fmt: skip
    page.table(
        ("setting", "of", "orders", "mean", "standard deviation"),
        [
            (setting, names[name], len(one["orders"]), one["mean"], one["sd"])
            for setting, own in more["shuffles"].items()
            for name, one in own.items()
        ],
    )
    page.text("By the place of the target, over all orders; without anchors:")
    page.table(
        ("place", "n", "answers right", "attention accuracy"),
        [
            (place, one["answers"]["n"], _share(one["answers"]), _share(one["attention"]))
            for place, one in more["places"].items()
        ],
    )


def _anchor(page: Report, anchor: Json) -> None:
    page.heading("An anchor")
    page.text(
        f"The last picture is what the others are compared with; {_share(anchor['answers'])} of {anchor['samples']} answers "
        "are right. Attention accuracy by the rows of that picture, and by those of question and answer:"
    )
    rows = []
    for name in ("right", "every"):
        for which in ("image", "text"):
            if best := anchor.get(name, {}).get(which, {}).get("best"):
                rows.append((
                    "right answers" if name == "right" else "all answers", f"{which} to image", best["n"],
                    f"{NAMES[best['metric']]}-{best['layers']}", _share(best),
                ))  # fmt: skip
    page.table(("of", "rows", "n", "best", "attention accuracy"), rows)


def _share(one: Json, signed: bool = False) -> Measured:
    return Measured(one["value"], one["value_95"], signed=signed)
