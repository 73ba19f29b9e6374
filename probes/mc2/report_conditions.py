"""The sections of the conditions in the report of `helmsight eval mc2`: shares, checks, tasks, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.conflicts.samples import SIDES
from probes.mc2.derived import ALIKE, SETTLED
from probes.mc2.evaluate import spread
from probes.mc2.lens import SURFACED
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured

Numbers = Mapping[str, Any]

TITLES = {
    "plain": "plain",
    "instruct_vision": "instruction toward vision",
    "instruct_text": "instruction toward text",
    "chain_vision": "chain of thought toward vision",
    "chain_text": "chain of thought toward text",
    "shots_vision": "four-shot toward vision",
    "shots_text": "four-shot toward text",
    "vision": "steered toward vision",
    "text": "steered toward text",
    "both_vision": "instructed and steered toward vision",
    "both_text": "instructed and steered toward text",
}


SHARES = ("s_vision", "s_text", "s_others", "vision_ratio")


def conditions(page: Report, results: Numbers) -> None:
    """Add the three shares of every condition, the checks, and the table by task."""
    page.heading("Conditions")
    for side, advantage in results.get("advantages", {}).items():
        page.text(
            f"Toward {side}, steering follows {_more(advantage['difference'])} samples "
            f"{_than(advantage['difference'])} the best other "
            f"condition, {TITLES[advantage['other']]} (95 % interval: {_between(*advantage['difference_95'])})."
        )
    titled = {TITLES[name]: result for name, result in results.items() if name in TITLES}
    page.plot(
        "conditions",
        plots.shares(
            {name: (result["s_vision"], result["s_text"], result["s_others"]) for name, result in titled.items()}
        ),
        "Shares of the samples by condition",
    )
    rows: list[tuple[Any, ...]] = [(name, *(share(result, of) for of in SHARES)) for name, result in titled.items()]
    if "random" in results:
        draws = results["random"]["each"]
        spreads = [spread([draw[of] for draw in draws]) for of in SHARES]
        rows += [
            (f"{len(draws)} random directions, {name}", *(value[name] for value in spreads))
            for name in ("min", "mean", "max")
        ]
    page.table(["condition", "S_v", "S_t", "S_o", "Vision Ratio"], rows)
    page.text(
        "Every question is asked in both orders of its options. S_o: samples answered inconsistently or not at all. "
        "Vision Ratio: S_v / (S_v + S_t). In parentheses are 95 % intervals: Wilson's for shares, for the ratio over "
        "the samples that follow either side; bootstrap over samples for differences and quotients of means."
    )
    page.heading("Checks", 3)
    page.table(
        ["condition", "unanswered", "attention ratio", "image only", "context only"],
        [
            (name, result["unanswered"], *(result.get(of) for of in ("attention_ratio", "no_conflict_accuracy",
             "context_only_accuracy")))
            for name, result in titled.items()
        ],
    )  # fmt: skip
    page.text(
        "Image only and context only: right answers without a conflict. Attention ratio: mean attention to an image token, "
        "divided by the sum of that and the mean attention to a token of the text context."
    )
    _by_task(page, results)


def _by_task(page: Report, results: Numbers) -> None:
    conditions = {name: result for name, result in results.items() if name in TITLES}
    tasks = sorted({task for result in conditions.values() for task in result["by_task"]})
    head = ["condition", *(task.replace("_", " ") for task in tasks)]
    page.heading("Vision Ratio by task", 3)
    page.table(
        head,
        [
            (TITLES[name], *(result["by_task"][task]["vision_ratio"] for task in tasks))
            for name, result in conditions.items()
        ],
    )
    page.heading("Share that follows the side by task", 3)
    sided = {name: side for name in conditions for side in SIDES if name.endswith(side)}
    page.table(
        head,
        [
            (TITLES[name], *(conditions[name]["by_task"][task][f"s_{side}"] for task in tasks))
            for name, side in sided.items()
        ],
    )


def alone(page: Report, results: Numbers) -> None:
    """Add Tables 16 and 17."""
    rows_by_condition = {
        name: result["by_task"]
        for name, result in results.items()
        if name in TITLES and "no_conflict_accuracy" in result
    }
    rows_by_condition = {
        name: rows
        for name, rows in rows_by_condition.items()
        if all("no_conflict_accuracy" in row for row in rows.values())
    }
    if not rows_by_condition:
        return
    tasks = list(next(iter(rows_by_condition.values())))
    page.heading("One modality alone by task (Tables 16 and 17)", 3)
    page.table(
        ["condition", "shown", *(task.replace("_", " ") for task in tasks)],
        [
            (TITLES[name], words, *(rows[task][of] for task in tasks))
            for words, of in (("context only", "context_only_accuracy"), ("image only", "no_conflict_accuracy"))
            for name, rows in rows_by_condition.items()
        ],
    )


def attention_by_task(page: Report, results: Numbers, words: Mapping[str, float], correlations: Numbers) -> None:
    """Add Figure 3, left, and Table 4: the plain answers' attention beside their preference."""
    rows = results.get("plain", {}).get("by_task", {})
    if not words and not any("attention_ratio" in row for row in rows.values()):
        return
    page.heading("Attention and preference by task (Figure 3, left; Table 4)", 3)
    for over, correlation in correlations.items():
        if correlation["spearman"] is not None:
            page.text(
                f"Over {correlation['n']} {over} the ranks of attention ratio and Vision Ratio correlate by "
                f"{correlation['spearman']:.2f} "
                "(Spearman)."
            )
    titles = {task: task.replace("_", " ") for task in rows}
    ratios = {titles[task]: row["attention_ratio"] for task, row in rows.items() if "attention_ratio" in row}
    points = {titles[task]: row["vision_ratio"] for task, row in rows.items() if row["vision_ratio"] is not None}
    if ratios:
        page.plot(
            "attention-tasks",
            plots.bars(ratios, xlabel="ratio", label="attention ratio", points=("Vision Ratio", points)),
            "Attention ratio and Vision Ratio of plain answers by task",
        )
    page.table(
        ["task", "Vision Ratio", "attention ratio", "words of a context"],
        [
            (titles[task], row["vision_ratio"], row.get("attention_ratio"), words.get(task))
            for task, row in rows.items()
        ],
    )


def attention_by_layer(page: Report, results: Numbers, steered: Sequence[int], layers: int | None = None) -> None:
    """Add Figures 6 and 13 to 18: the image's share of attention in each layer, steered and instructed.

    steered: the layers to mark, by their numbers in a model of so many `layers`; not all of them may have attention.
    """
    with_layers = {name: result for name, result in results.items() if name in ALIKE and "attention_by_layer" in result}
    if not with_layers:
        return
    curves = {TITLES[name]: result["attention_by_layer"] for name, result in with_layers.items()}
    intervals = {TITLES[name]: result["attention_by_layer_95"] for name, result in with_layers.items()}
    count = len(next(iter(curves.values())))
    page.heading("Attention by layer (Figures 6 and 13 to 18)", 3)
    page.text("The image's share of the attention, as in the attention ratio; the rest is the text context's.")
    if some := layers not in (None, count):
        page.text(f"{count} of the model's {layers} layers have attention weights; they are numbered from 0.")
    marked = {"vision", "text"} & with_layers.keys() and not some
    page.plot(
        "attention-layers",
        plots.curves(
            range(count), curves, xlabel="layer", ylabel="attention ratio", intervals=intervals,
            marks=dict.fromkeys(steered, "steered") if marked else None,
        ),
        "Attention ratio by layer",
    )  # fmt: skip
    page.table(
        ["layer", *curves],
        [
            (layer, *(Measured(curve[layer], intervals[name][layer]) for name, curve in curves.items()))
            for layer in range(count)
        ],
    )


def lens(page: Report, results: Numbers, steered: Sequence[int]) -> None:
    """Add the margin of the two options as read from each layer."""
    margins = {_preferring(name): margin for name, margin in results.items()}
    count = len(next(iter(margins.values()))["margin"])
    page.heading("Margin of the options by layer (the authors' rebuttal, W3)")
    page.text(
        "The states at the prompt's last token, read through the final norm and the output embedding: the logit of the "
        "preferred side's option minus that of the other one, with its 95 % interval over samples. Plain answers are "
        "grouped by the option that the last layer prefers. A margin surfaces at the first layer from which on it stays "
        f"above 0 and above {100 * SURFACED:.0f} % of the last layer's."
    )
    page.plot(
        "lens",
        plots.curves(
            range(count),
            {name: margin["margin"] for name, margin in margins.items()},
            xlabel="layer",
            ylabel="margin (logits)",
            intervals={name: margin["margin_95"] for name, margin in margins.items()},
            marks=dict.fromkeys(steered, "steered"),
        ),
        "Margin of the preferred option by layer",
    )
    page.table(
        ["layer", *margins],
        [
            (layer, *(Measured(margin["margin"][layer], margin["margin_95"][layer]) for margin in margins.values()))
            for layer in range(count)
        ],
    )
    page.table(
        ["condition", "questions", "surfaces at layer", "preferred, last layer", "other, last layer"],
        [
            (name, margin["n"], margin["surfaces"], margin["preferred"][-1], margin["other"][-1])
            for name, margin in margins.items()
        ],
    )


def _preferring(name: str) -> str:
    """Return the name of a condition of `lens`."""
    return TITLES[name] if name in TITLES else f"plain, preferring {name.removeprefix('plain_')}"


def sizes(page: Report, results: Numbers) -> None:
    """Add Table 6."""
    page.heading("Size of the evaluation (Table 6)")
    settled = (
        "No smaller number is enough."
        if results["settled"] is None
        else f"With {results['settled']} or more of each task, 95 % of the draws are within {100 * SETTLED:.0f} points of "
        "all."
    )
    page.text(
        "Plain answers of a number of samples of each task, drawn a thousand times: the mean Vision Ratio and the interval "
        f"of the middle 95 % of the draws. {settled}"
    )
    page.table(
        ["samples of each task", "Vision Ratio"],
        [(size, Measured(row["vision_ratio"], row["vision_ratio_95"])) for size, row in results["rows"].items()],
    )


def _more(difference: float) -> str:
    points = f"{100 * abs(difference):.1f}"
    return "as many" if points == "0.0" else f"{points} points {'more' if difference > 0 else 'fewer'}"


def _than(difference: float) -> str:
    return "as" if _more(difference) == "as many" else "than"


def _between(low: float, high: float) -> str:
    """Return an interval of a difference in words."""
    least, most = (f"{100 * abs(bound):.1f}" for bound in (low, high))
    if low == high == 0:
        return "0 points"
    if low >= 0:
        return f"{least} to {most} points more"
    return f"{most} to {least} points fewer" if high <= 0 else f"{least} points fewer to {most} more"


def share(shares: Numbers, name: str) -> Measured:
    """Return a share with its interval, as a cell."""
    return Measured(shares[name], shares.get(f"{name}_95"))
