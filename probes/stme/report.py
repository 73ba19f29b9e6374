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
One of several images, the target, holds the answer. The *focused* image is the one with the most attention from question
and answer over the last N layers: by the largest single attention factor (LND), by the mean (M-LND), or in most layers
(MC-LND). *Attention accuracy* is the share of right answers whose focused image is the target; a right answer with another
focused image is an *implicit misunderstanding* (IVM). Where metric and N are the best of all, they were chosen on the same
answers, as in the paper; *halves* chooses them on one half of the answers and measures on the other."""

Json = Mapping[str, Any]


def report(about: Json, results: Json, more: Json, picture: Image.Image | None = None) -> Report:
    """Return the report of a run.

    `about` describes the run, `results` is the result of `compare`, `more` that of `findings`; `picture` is the one whose
    patches are marked.
    """
    page = Report(f"Attention accuracy of {about['model']}")
    page.facts({
        "Data": about["data"], "Left out": about["left_out"] or None,
        "Not shuffled, because the texts between their images differ": about["not_shuffled"] or None,
        "Answers are right by": f"{about['scoring']} matching", "Model": about["model"],
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    page.text(ABOUT)
    if "attention" not in more:
        page.text("The answering server has no diagnostics, so the attention is unknown.")
    _conditions(page, results, measured="attention" in more)
    if "attention" in more:
        _attention(page, more)
        _layers(page, more)
        _cases(page, more["cases"])
        if picture is not None:
            _patches(page, more["patches"], picture)
    _controls(page, more)
    return page


def _conditions(page: Report, results: Json, measured: bool) -> None:
    page.heading("Answers and attention")
    if len(results) > 1:
        page.text(READING)
        power(page, results, SAMPLES, "answers", "samples")
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
    table(page, results, SAMPLES, columns | looks if measured else columns, list(results[BASELINE][SAMPLES]))


def _attention(page: Report, more: Json) -> None:
    page.heading("By the number of layers")
    plain = more["attention"][BASELINE]
    rows = []
    for name, settings in more["attention"].items():
        for setting, result in settings.items():
            for answers in ("right", "wrong"):
                if best := result[answers].get("best"):
                    halves = result[answers].get("halves")
                    rows.append((
                        name, setting, answers, result[answers]["n"], f"{NAMES[best['metric']]}-{best['layers']}",
                        _share(best), halves and _share(halves), *result[answers]["by_metric"].values(),
                    ))  # fmt: skip
    page.table(("condition", "setting", "answers", "n", "best", "attention accuracy", "halves", *NAMES.values()), rows)
    for setting, result in list(plain.items())[len(plain) > 2 :]:
        if curves := result["right"].get("curves"):
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
            for setting, result in plain.items()
            for four in (result["quadrants"], result["quadrants_best"])
        ],
    )
    page.heading("By task", 3)
    metrics = {
        "answers right": "answers",
        "attention accuracy": "attention",
        "of wrong answers": "attention_wrong",
        "IVM": "ivm",
    }
    tasks = {name: task for name, task in more["tasks"].items() if name != "all"}
    page.table(
        ("task", "n", *metrics),
        [
            (name, task["samples"], *(Measured(task[key]["value"], task[key]["value_95"]) for key in metrics.values()))
            for name, task in tasks.items()
        ],
    )


def _layers(page: Report, more: Json) -> None:
    page.heading("Layer by layer")
    page.text(
        "The target's share of the attention factors of all images, divided by its share under even attention: 1 is even "
        "attention."
    )
    series = {
        f"{setting}, {answers}": result[answers]
        for setting, result in more["convergence"].items()
        for answers in ("right", "wrong")
        if result[answers] and setting != "all"
    }
    if series:
        layers = list(range(len(next(iter(series.values())))))
        figure = plots.curves(layers, series, xlabel="layer", ylabel="look at the target (1: even)")
        page.plot("convergence", figure, "Relative attention to the target by layer, for right and for wrong answers")
    rises = {setting: result["rise"] for setting, result in more["convergence"].items() if "rise" in result}
    page.table(
        ("setting", "n", "more in the last third of the layers than in the first, right answers"),
        [
            (setting, rise["n"], Measured(rise["value"], rise["value_95"], signed=True))
            for setting, rise in rises.items()
        ],
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
            f"A right answer that looks {case['case']} ({case['sample']}): attention factor by layer and image. "
            f"{case['question']} {case['answer']}",
        )  # fmt: skip


def _patches(page: Report, results: Json, picture: Image.Image) -> None:
    page.heading("Within the target")
    if results["n"]:
        up = results["rise"]
        page.text(
            f"For {results['n']} right answers with the target in focus: the share of the target's attention that lies "
            "where the answer is, relative to even attention (1). In the last third of the layers it is "
            f"{_share(up, signed=True)} more than in the first. For token activation maps of the generated words: "
            f"{_share(results['said'])}."
        )
        figure = plots.curves(
            list(range(len(results["on_spot"]))), {"where the answer is": results["on_spot"]},
            xlabel="layer", ylabel="look at the place (1: even)",
        )  # fmt: skip
        page.plot("spot", figure, "Relative attention to the place of the answer within the target, by layer")
    rho = np.array(results["case"]["rho"])
    count, shape = max(1, round(MARKED * rho.shape[1])), results["case"]["grid"]
    panels = {}
    for layer in sorted({0, len(rho) // 2, len(rho) - 1}):
        cells = np.zeros(rho.shape[1], bool)
        cells[np.argsort(-rho[layer], kind="stable")[:count]] = True
        panels[f"layer {layer}"] = cells.reshape(shape)
    page.plot(
        "patches",
        plots.marked(picture, panels),
        f"The strongest {MARKED:.0%} of the patches ({results['case']['sample']})",
    )


def _controls(page: Report, more: Json) -> None:
    if "shuffles" in more:
        _shuffles(page, more)
    page.heading("Asked for the image, and asked without images")
    page.text(
        "*named*: asked for the numbers of the images that the answer relies on, the model names the target. *blind*: "
        "asked without images, the model answers rightly."
    )
    page.table(
        ("setting", "n", "named", "blind"),
        [
            (setting, result["samples"], *(_share(more[part][setting]["share"]) for part in ("which", "blind")))
            for setting, result in more["which"].items()
        ],
    )
    if needed := more.get("unseen_needed"):
        best = needed["attention"].get("best")
        page.text(
            f"{needed['answers']['n']} samples are not answered rightly without images. With them, "
            f"{_share(needed['answers'])} are answered rightly, with attention accuracy {_share(best) if best else '-'}."
        )
    if "hidden" in more:
        page.heading("One image hidden")
        page.text(
            "The share of answers that change when a gray image replaces the focused image, and when it replaces another "
            "one: the target if that is not focused, else a random one. An answer should change when the image that it "
            "relies on is hidden. If the focus is elsewhere and hiding the target changes the answer, the focus misled, "
            "and the answer was no misunderstanding."
        )
        page.table(
            ("answers", "n", "the focused one", "the other one", "more"),
            [
                (
                    name,
                    result["samples"],
                    _share(result["focused"]),
                    _share(result["other"]),
                    _share(result["more"], signed=True),
                )
                for name, result in more["hidden"].items()
            ],
        )
    if more.get("anchor", {}).get("samples"):
        _anchor(page, more["anchor"])
    if more.get("needles", {}).get("found"):
        page.heading("Needles that were found")
        needles, best = more["needles"], more["needles"]["best"]
        page.text(
            f"{needles['found']} of {needles['samples']} answers to a needle's question are right or read other digits from "
            f"an image. Their attention accuracy is {_share(best)} by {NAMES[best['metric']]}-{best['layers']}, and "
            f"{_share(needles['own'])} by the model's own metric."
        )


def _shuffles(page: Report, more: Json) -> None:
    page.heading("Other orders of the images")
    names = {
        "answers": "answers right", "attention_best": "attention, best metric and N of each order",
        "attention": "attention, the model's own",
    }  # fmt: skip
    page.table(
        ("setting", "of", "orders", "mean", "standard deviation"),
        [
            (setting, names[name], len(result["orders"]), result["mean"], result["sd"])
            for setting, results in more["shuffles"].items()
            for name, result in results.items()
        ],
    )
    page.text("By the place of the target, over all orders; without anchors:")
    page.table(
        ("place", "n", "answers right", "attention accuracy"),
        [
            (place, result["answers"]["n"], _share(result["answers"]), _share(result["attention"]))
            for place, result in more["places"].items()
        ],
    )


def _anchor(page: Report, anchor: Json) -> None:
    page.heading("An anchor")
    page.text(
        f"The other images are compared with the last one; {_share(anchor['answers'])} of {anchor['samples']} answers are "
        "right. Attention accuracy by the rows of the last image, and by those of question and answer:"
    )
    rows = []
    for name in ("right", "every"):
        for kind in ("image", "text"):
            if best := anchor.get(name, {}).get(kind, {}).get("best"):
                rows.append((
                    "right answers" if name == "right" else "all answers", f"{kind} to image", best["n"],
                    f"{NAMES[best['metric']]}-{best['layers']}", _share(best),
                ))  # fmt: skip
    page.table(("of", "rows", "n", "best", "attention accuracy"), rows)


def _share(score: Json, signed: bool = False) -> Measured:
    return Measured(score["value"], score["value_95"], signed=signed)
