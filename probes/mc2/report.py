"""The report of `helmsight eval mc2`: tables, plots, and what can be read from them in one line each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.conflicts.samples import SIDES
from probes.conflicts.shares import Shares
from probes.harness import plots
from probes.harness.report import Report
from probes.mc2.ablate import CLOSE, Knee, Latency, Steered
from probes.mc2.automatic import AutomaticReport, Worth
from probes.mc2.evaluate import Evaluation, Preference

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


def _condition(name: str, one: Preference) -> tuple[Any, ...]:
    shares = one.shares
    return (
        name, shares.s_vision, shares.s_text, shares.s_others, shares.vision_ratio, _interval(shares), one.unanswered,
        one.attention_ratio, one.image_only, one.context_only,
    )  # fmt: skip


def _interval(shares: Shares, name: str = "vision_ratio") -> str | None:
    found = shares.intervals.get(name)
    return None if found is None else f"{found[0]:.3f} to {found[1]:.3f}"


def _row(names: tuple[Any, ...], row: Steered) -> tuple[Any, ...]:
    values: list[Any] = [*names]
    for side in SIDES:
        shares = row.shares[side]
        values += [shares.toward(side), _interval(shares, f"s_{side}"), shares.vision_ratio, shares.s_others]
    return tuple(values)


def _ablation(page: Report, first: list[str], rows: Mapping[tuple[Any, ...], Steered]) -> None:
    head = [*first]
    for side in SIDES:
        head += [f"S_{side[0]} toward {side}", "95 %", "Vision Ratio", "S_o"]
    page.table(head, [_row(names, row) for names, row in rows.items()])


def _curves(rows: Mapping[Any, Steered], xlabel: str, **options: Any) -> Any:
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


def samples(page: Report, rows: Mapping[int, Steered]) -> None:
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


def tasks(page: Report, rows: Mapping[str, Steered]) -> None:
    """Table 9."""
    page.heading("One task only (Table 9)")
    page.text("Vectors from the probe samples of one task, steering all tasks.")
    page.plot(
        "probe-task",
        plots.bars({name: row.effect for name, row in rows.items()}, xlabel="share that follows, mean of both sides"),
        "Effect by the task that was probed",
    )
    _ablation(page, ["probe task"], {(task,): row for task, row in rows.items()})


def strength(page: Report, rows: Mapping[float, Steered], bend: Knee, published: float | None = None) -> None:
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


def automatic(page: Report, found: AutomaticReport) -> None:
    """Table 12, with the gap that each criterion closes."""
    page.heading("Finding the way without being told (Table 12)")
    page.text(
        "One modality of each sample is degraded, the other one's answer is right. Gap closed: how much of the difference "
        "between the plain model and one that is steered to the known right side (prior) a criterion makes up, "
        "(auto - plain) / (prior - plain), with the 95 % interval over samples drawn anew; none where prior is not better "
        "than plain."
    )
    pooled = found.groups()
    for criterion in found.criteria:
        page.text(_worth(criterion, *(found.row(pooled[group], criterion) for group in pooled)))
    page.text(
        "Drop measures what the plain answer rests on, not which side is right. Surprise measures the text alone: it "
        "abstains where the text is not surprising, unless it is told that one modality is degraded; the rows on unfamiliar "
        "text show a sound text in a wording that the model does not know."
    )
    for severity in (None, *found.severities):
        page.heading("All severities" if severity is None else f"Severity {severity:g}", 3)
        _automatic_table(page, found, severity)
    page.heading("What is left of each modality", 3)
    page.text(
        "Right answers where one modality is shown alone, each for its own answer: the sound one's must be readable; of the "
        "degraded one chance is .5 of two options."
    )
    page.table(
        ["degraded", "severity", "sound modality alone", "degraded modality alone"],
        [
            (
                "text" if cell.side == "vision" else "image, unfamiliar text" if cell.reworded else "image",
                f"{cell.severity:g}", cell.reliable_alone, cell.degraded_alone,
            )
            for cell in found.cells
        ],
    )  # fmt: skip


def _automatic_table(page: Report, found: AutomaticReport, severity: float | None) -> None:
    rows = []
    for group, cells in found.groups(severity).items():
        for criterion in found.criteria:
            row = found.row(cells, criterion)
            closed, interval = row.gap_closed or (None, None)
            rows.append(
                (
                    group, criterion, row.plain, row.prior, row.auto, closed,
                    None if interval is None else "{:.3f} to {:.3f}".format(*interval), row.decided, 1 - row.decided,
                    row.toward_vision, row.right_if_decided, row.follows, row.tasks,
                )
            )  # fmt: skip
    page.table(
        ["degraded", "criterion", "plain", "prior", "auto", "gap closed", "95 %", "decided", "abstained", "toward vision",
         "right if decided", "points to the plain answer's side", "tasks by majority"],
        rows,
    )  # fmt: skip


def _worth(
    criterion: str,
    either: Worth,
    image: Worth,
    text: Worth,
    unfamiliar: Worth,
    either_unfamiliar: Worth,
) -> str:
    """A criterion in one paragraph, over all severities."""
    return (
        f"{criterion}: closes {_closed(either)} of the gap, {_closed(image)} with a degraded image, {_closed(text)} with a "
        f"degraded text; where sound texts are in an unfamiliar wording {_closed(either_unfamiliar)}, {_closed(unfamiliar)} "
        f"with a degraded image. It decides {100 * either.decided:.0f} % of the questions, "
        f"{_percent(either.right_if_decided)} of those rightly, and points to the plain answer's side in "
        f"{_percent(either.follows)}. It steers away from {100 * image.toward_vision:.0f} % of the sound texts, "
        f"{100 * unfamiliar.toward_vision:.0f} % of those in an unfamiliar wording and {100 * text.toward_vision:.0f} % of "
        f"the degraded ones."
    )


def _closed(row: Worth) -> str:
    if row.gap_closed is None:
        return "(no gap)"
    closed, (low, high) = row.gap_closed
    return f"{closed:+.2f} ({low:+.2f} to {high:+.2f})"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.0f} %"
