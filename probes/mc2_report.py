"""The report of `helmsight eval mc2`: tables, plots, and what can be read from them in one line each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes import plots
from probes.ablate import CLOSE, Knee, Latency, Row
from probes.automatic import NUMBERS, AutomaticReport, vote
from probes.evaluate import Evaluation, Measured
from probes.mc2 import SIDES, Shares
from probes.report import Report

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
}


def conditions(page: Report, found: Evaluation) -> None:
    """The three shares of every condition, the checks, and the table by task."""
    page.heading("Conditions")
    for advantage in found.advantages():
        page.text(
            f"Toward {advantage.side}, steering follows {100 * advantage.difference:+.1f} points more samples than the best "
            f"other condition, {TITLES[advantage.other]} (95 % interval {100 * advantage.interval[0]:+.1f} to "
            f"{100 * advantage.interval[1]:+.1f})."
        )
    shown = {TITLES[name]: one for name, one in found.conditions.items()}
    page.plot(
        "conditions",
        plots.shares({n: (o.shares.s_vision, o.shares.s_text, o.shares.s_others) for n, o in shown.items()}),
        "Shares of the samples by condition",
    )
    rows = [_condition(name, measured) for name, measured in shown.items()]
    if found.random:
        spreads = found.random_spread().values()
        rows += [
            (f"{len(found.random)} random directions, {name}", *(one[name] for one in spreads), *[None] * 5)
            for name in ("min", "mean", "max")
        ]
    page.table(
        ["condition", "S_v", "S_t", "S_o", "Vision Ratio", "95 %", "unanswered", "attention ratio", "image only",
         "context only"],
        rows,
    )  # fmt: skip
    page.text(
        "Every question is asked in both orders of its options; S_o are the samples answered inconsistently or not at all. "
        "Image only and context only: right answers where nothing conflicts. Attention ratio: mean attention to an image "
        "token over that plus the mean attention to a token of the text context."
    )
    tasks = sorted({task for one in found.conditions.values() for task in one.by_task})
    page.heading("Vision Ratio by task", 3)
    page.table(
        ["condition", *tasks],
        [(name, *(one.by_task[task].vision_ratio for task in tasks)) for name, one in shown.items()],
    )
    page.heading("Share that follows the side by task", 3)
    page.table(
        ["condition", *tasks],
        [(n, *(o.by_task[task].toward(o.side) for task in tasks)) for n, o in shown.items() if o.side is not None],
    )


def _condition(name: str, one: Measured) -> tuple[Any, ...]:
    shares = one.shares
    return (
        name, shares.s_vision, shares.s_text, shares.s_others, shares.vision_ratio, _interval(shares), one.unanswered,
        one.attention_ratio, one.image_only, one.context_only,
    )  # fmt: skip


def _interval(shares: Shares, name: str = "vision_ratio") -> str | None:
    found = shares.intervals.get(name)
    return None if found is None else f"{found[0]:.3f} to {found[1]:.3f}"


def _row(names: tuple[Any, ...], row: Row) -> tuple[Any, ...]:
    values: list[Any] = [*names]
    for side in SIDES:
        shares = row.shares[side]
        values += [shares.toward(side), _interval(shares, f"s_{side}"), shares.vision_ratio, shares.s_others]
    return tuple(values)


def _ablation(page: Report, first: list[str], rows: Mapping[tuple[Any, ...], Row]) -> None:
    head = [*first]
    for side in SIDES:
        head += [f"S_{side[0]} toward {side}", "95 %", "Vision Ratio", "S_o"]
    page.table(head, [_row(names, row) for names, row in rows.items()])


def _curves(rows: Mapping[Any, Row], xlabel: str, **options: Any) -> Any:
    return plots.curves(
        list(rows),
        {f"S_{side[0]} toward {side}": [row.shares[side].toward(side) for row in rows.values()] for side in SIDES}
        | {f"S_o toward {side}": [row.shares[side].s_others for row in rows.values()] for side in SIDES},
        xlabel=xlabel,
        ylabel="share of the samples",
        intervals={
            f"S_{side[0]} toward {side}": [row.shares[side].intervals.get(f"s_{side}") for row in rows.values()]
            for side in SIDES
        },
        **options,
    )


def samples(page: Report, rows: Mapping[int, Row]) -> None:
    """Table 8."""
    page.heading("Probe size (Table 8)")
    least, most = min(rows), max(rows)
    lost = max(abs(rows[most].shares[side].toward(side) - rows[least].shares[side].toward(side)) for side in SIDES)
    page.text(
        f"{least} samples and {most} samples differ by {100 * lost:.1f} points at most "
        f"({'within' if lost <= CLOSE else 'NOT within'} {100 * CLOSE:.0f})."
    )
    page.plot("probe-size", _curves(rows, "probe samples"), "Effect by number of probe samples")
    _ablation(page, ["samples"], {(size,): row for size, row in rows.items()})


def tasks(page: Report, rows: Mapping[str, Row]) -> None:
    """Table 9."""
    page.heading("One task only (Table 9)")
    page.text("Vectors from the probe samples of one task, steering all tasks.")
    page.plot(
        "probe-task",
        plots.bars({name: row.effect for name, row in rows.items()}, xlabel="share that follows, mean of both sides"),
        "Effect by the task that was probed",
    )
    _ablation(page, ["probe task"], {(task,): row for task, row in rows.items()})


def strength(page: Report, rows: Mapping[float, Row], bend: Knee, published: float | None = None) -> None:
    """Table 10. `rows` and `bend` are by strength in published units, of which the vector's strength 1.0 is `published`; by
    its own strength where that is not known."""
    page.heading("Strength (Table 10)")
    after = "it is the greatest that was tried"
    if bend.slope_after is not None:
        broken = "no strength tried breaks the effect" if bend.breaks_at is None else f"it breaks at {bend.breaks_at:g}"
        after = f"{100 * bend.slope_after:+.0f} after; {broken}"
    units = (
        "The vector does not say how much of the published weight its own is: strengths are its own."
        if published is None
        else f"Strengths are in published units; the vector's own strength 1.0 is {published:g} of them."
    )
    page.text(
        f"{units} Knee {'visible' if bend.visible else 'NOT visible'}: at strength {bend.strength:g} the effect is within "
        f"{100 * CLOSE:.0f} points of its greatest; it grows by {100 * bend.slope_before:.0f} points a unit of strength "
        f"before and {after}."
    )
    if published is None:
        page.plot("strength", _curves(rows, "strength", marks={bend.strength: "knee"}), "Effect by strength")
        _ablation(page, ["strength"], {(one,): row for one, row in rows.items()})
        return
    marks = {published: "strength 1.0"}
    marks[bend.strength] = "knee" if bend.strength != published else "knee, strength 1.0"
    page.plot(
        "strength",
        _curves(rows, "strength (published)", marks=marks, other_x=("strength (calibrated)", 1 / published)),
        "Effect by strength",
    )
    _ablation(page, ["published", "calibrated"], {(one, round(one / published, 4)): row for one, row in rows.items()})


def latency(page: Report, rows: Mapping[str, Latency]) -> None:
    """Table 11."""
    page.heading("Latency of one request (Table 11)")
    page.table(
        ["way", "seconds (median)", "ratio to plain", "95 %"],
        [(n, f"{one.seconds:.4f}", one.ratio, "{:.3f} to {:.3f}".format(*one.interval)) for n, one in rows.items()],
    )


def automatic(page: Report, found: AutomaticReport, severity: float) -> None:
    """Table 12."""
    data = found.to_json()
    right = sum(one.decided.sum() * one.right_if_decided for one in found.sides.values())
    sure = right / (found.joined("decided").sum() or 1)
    page.heading("Finding the reliable modality (Table 12)")
    page.text(
        f"One modality of each sample is degraded (severity {severity:g}), the other one's answer is right. The reliable "
        f"one has the larger drop for {_points(data['identified'])} % of the questions; auto decides "
        f"{_points(data['decided'])} % of them, {100 * sure:.1f} % of those rightly, and "
        f"{100 * data['tasks_identified']:.1f} % of the tasks by their majority. Its accuracy is "
        f"{_points(data['auto_minus_prior'])} points from that of steering where the side is known."
    )
    rows: list[Sequence[Any]] = []
    for name, one in (("both", data), *((f"only {side}", data["sides"][side]) for side in SIDES)):
        numbers = [one[key]["mean"] for key in NUMBERS]
        numbers.insert(2, one.get("right_if_decided"))
        rows.append([name, *numbers, one.get("reliable_alone"), one.get("degraded_alone")])
    page.table(
        ["reliable", "larger drop is its", "decided", "right if decided", "right answer, plain", "side known", "auto",
         "reliable modality alone", "degraded modality alone"],
        rows,
    )  # fmt: skip
    page.text(
        "Auto leaves a question undecided, and unsteered, where the answer stands without either modality. The last two "
        "columns check the degradation: the answer of the modality that is shown alone, which is chance (.5 of two "
        "options) where nothing of it is left."
    )
    page.table(
        ["reliable", "task", "votes for vision", "for text", "for none", "majority is right"],
        [
            (side, task, votes["vision"], votes["text"], votes["none"], vote(votes) == side)
            for side, one in found.sides.items()
            for task, votes in one.votes.items()
        ],
    )


def _points(number: Mapping[str, Any]) -> str:
    """A mean with its interval, in points."""
    low, high = (100 * end for end in number["mean_95"])
    return f"{100 * number['mean']:.1f} ({low:.1f} to {high:.1f})"
