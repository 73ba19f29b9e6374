"""Readings of the reports of MC2 and of a probe for the rows of the modality-preference paper."""

from __future__ import annotations

import math

from probes.harness.bootstrap import wilson
from probes.reproduce.items import CEILING, Figure, Found, Json, UnreadableRun, change, figure
from probes.reproduce.readings.groups import LEVEL, alike

SIDES = ("vision", "text")
SIZES = ("size-1", "size-4", "size-16")
"""The organisms of one course, in order of their parameters."""
SETTLED = 150 / 250
"""The share of each task's samples with which the paper's ratio settles (section E.1, Table 6)."""
LEARNT = 0.5
"""The share of questions without a text that a model must answer rightly in both orders to have a preference."""
NEAR = 0.05
"""The difference below which shares are alike, in the paper's sense of stable."""
SHARES = (0, 25, 50, 75, 100)
"""Per cent of conflicts in the training of the organisms that are named after them."""


def by_parameters(report: Json) -> Found:
    """Read row 4; raise UnreadableRun if a size did not learn to choose among options: its ratio is of guesses."""
    rows = [_organism(report, name) for name in SIZES]
    for name, row in zip(SIZES, rows, strict=True):
        right = row["preference"]["picture_alone"]["s_vision"]
        if right < LEARNT:
            raise UnreadableRun(f"{name} has not learnt to choose options: {right:.3f} right without a text")
    conflicts = {f"{row['parameters'] / 1e6:.1f} M": row["preference"]["conflict"] for row in rows}
    ratios = {size: figure(conflict, "vision_ratio") for size, conflict in conflicts.items()}
    values = [ratio.value for ratio in ratios.values()]
    return Found.of(ratios, values == sorted(set(values)), rows[0]["preference"]["conflict"]["n"])


def by_share_of_conflicts(report: Json) -> Found:
    """Read row 19."""
    rows = {share: _organism(report, f"conflicts-{share}")["preference"]["conflict"] for share in SHARES}
    ours = {f"{share} %": figure(row, "vision_ratio") for share, row in rows.items()}
    moved = rows[0]["vision_ratio_95"][1] < rows[100]["vision_ratio_95"][0]
    return Found.of(ours, moved, rows[0]["n"])


def _organism(report: Json, name: str) -> Json:
    """Return the measurements of an organism; raise KeyError that says how to make it."""
    row: Json | None = report["organisms"].get(name)
    if row is None:
        raise KeyError(f"{name}, which 'helmsight demo train --organism {name}' makes")
    return row


def tasks_alike(report: Json) -> Found:
    """Read row 1."""
    counts = {task: row["n"] for task, row in report["conditions"]["plain"]["by_task"].items()}
    alike = len(counts) == 8 and len(set(counts.values())) == 1
    return Found({"tasks": len(counts), "samples of the least": min(counts.values())}, alike, n=sum(counts.values()))


def by_task(report: Json) -> Found:
    """Read row 3: a test of all tasks at once, as the lowest and the highest of eight lie apart by chance."""
    rows = report["conditions"]["plain"]["by_task"]
    ours = {task: figure(row, "vision_ratio") for task, row in rows.items() if row.get("vision_ratio_95")}
    p = alike(ours.values())
    return Found.of(ours | {"p": Figure(p)}, p < LEVEL, report["conditions"]["plain"]["n"])


def vision_ratio(report: Json) -> Found:
    """Read row 2: most of the paper's models prefer the text."""
    plain = report["conditions"]["plain"]
    bounds = plain["vision_ratio_95"]
    prefers = bounds is not None and bounds[1] < 0.5
    return Found(plain["vision_ratio"], prefers, bounds, plain["n"])


def alone(report: Json) -> Found:
    """Read row 6."""
    plain = report["conditions"]["plain"]
    rows = {"text": plain["context_only_accuracy"], "image": plain["no_conflict_accuracy"]}
    ours = {name: Figure(value, wilson(round(value * plain["n"]), plain["n"])) for name, value in rows.items()}
    return Found.of(
        ours,
        all(
            figure_of_side.interval is not None and figure_of_side.interval[0] >= 0.95
            for figure_of_side in ours.values()
        ),
        plain["n"],
    )


def advantages(report: Json) -> Found:
    """Read row 7; where the best other condition is followed always, steering cannot be better."""
    conditions = report["conditions"]
    rows = conditions["advantages"]
    better = all(rows[side]["difference_95"][0] > 0 for side in SIDES)
    ours = {f"toward {side}": change(rows[side]) for side in SIDES}
    others = {side: (rows[side]["other"], conditions[rows[side]["other"]][f"s_{side}"]) for side in SIDES}
    full = [f"{name} is followed in {share:.3f}" for name, share in others.values() if share >= CEILING]
    return Found.of(ours, better, report["about"]["samples"], nothing=f"ceiling: {', '.join(full)}" if full else "")


def words(report: Json) -> Found:
    """Read row 10."""
    counts = report["words"]
    return Found(counts, max(counts.values()) <= 1.7 * min(counts.values()), n=report["about"]["samples"])


def evaluation_size(report: Json) -> Found:
    """Read row 12: the width of the middle 95 % of the draws.

    Draws of nearly all samples are always near all, so the size from which they stay within two points counts in proportion
    to all, as in the paper.
    """
    if "sizes" not in report:
        raise UnreadableRun("there are too few samples of each task for smaller evaluations")
    rows = {size: row["vision_ratio_95"] for size, row in report["sizes"]["rows"].items()}
    widths = {size: high - low for size, (low, high) in rows.items()}
    settled, every = report["sizes"]["settled"], report["sizes"]["most"]
    soon = settled is not None and settled <= SETTLED * every
    return Found(widths | {"settled": settled}, soon, n=report["about"]["samples"])


def one_task(report: Json) -> Found:
    """Read row 14."""
    rows = report["tasks"]
    return Found.of(_shares_beside(rows), _alike(rows), report["about"]["samples"], _full(rows))


def sizes(report: Json) -> Found:
    """Read row 13."""
    rows = report["samples"]
    return Found.of(_shares_beside(rows), _alike(rows), next(iter(rows.values()))["text"]["n"], _full(rows))


def _shares_beside(rows: Json) -> dict[str, Figure]:
    """Return S_t of each setting, and its difference to that of the last one."""
    last = list(rows)[-1]
    shares = {name: figure(row["text"], "s_text") for name, row in rows.items()}
    return shares | {f"{name}, more than {last}": change(row["text"]) for name, row in rows.items() if name != last}


def _alike(rows: Json) -> bool:
    """Return whether S_t of all settings is within 5 points of the last one's on the same samples, with its interval."""
    apart = [change(row["text"]).interval for row in rows.values()]
    return all(interval is not None and interval[0] >= -NEAR and interval[1] <= NEAR for interval in apart)


def _full(rows: Json) -> str:
    """Return the reason why no setting could differ from the last one: it is followed always."""
    last = list(rows.values())[-1]["text"]["s_text"]
    return f"ceiling: S_t of the last is {last:.3f}" if last >= CEILING else ""


def strengths(report: Json) -> Found:
    """Read row 15."""
    rows = report["strength"]["rows"]
    shares = {strength: figure(row["text"], "s_text") for strength, row in rows.items()}
    best = max(shares.values(), key=lambda share: share.value)
    ends = [shares[pick(shares, key=float)] for pick in (min, max)]
    apart = all(_is_above(best, end, NEAR) for end in ends)
    return Found.of(shares, apart, next(iter(rows.values()))["text"]["n"])


def _is_above(high: Figure, low: Figure, by: float) -> bool:
    """Return whether the interval of one lies above the other's by that much; False without an interval."""
    return high.interval is not None and low.interval is not None and high.interval[0] - low.interval[1] >= by


def latency(report: Json) -> Found:
    """Read row 16; if the memory is unknown the time alone counts."""
    steering = report["latency"]["steering"]
    ours = {"time, steering": figure(steering, "ratio"), "time, probing": figure(report["latency"]["probing"], "ratio")}
    if steering.get("memory_ratio") is not None:
        ours["memory, steering"] = figure(steering, "memory_ratio")
    intervals = [figure_of_way.interval for name, figure_of_way in ours.items() if name.endswith("steering")]
    little = all(interval is not None and interval[1] <= 1.05 for interval in intervals)
    return Found.of(ours, little, min(report["about"]["samples"], 100))


def predicted(report: Json) -> Found:
    """Read row 17: the criterion of the paper, over all severities and either degraded modality."""
    (row,) = (
        row
        for row in report["auto"]["rows"]
        if (row["severity"], row["degraded"], row["criterion"]) == (None, "either", "drop")
    )
    closes = row["gap_closed"] is not None and row["gap_closed_95"][0] > 0
    return Found(row["gap_closed"], closes, row["gap_closed_95"], report["about"]["samples"])


def attention(report: Json) -> Found:
    """Read row 18."""
    ours = {f"over {name}": correlation["spearman"] for name, correlation in report["attention"].items()}
    follows = all(rho is not None and rho >= 0.5 for rho in ours.values())
    return Found(ours, follows, n=report["about"]["samples"])


def states(report: Json) -> Found:
    """Read row 20: distances of the centres from the plain one, on the first two components."""
    projection = report["projection"]
    near = {name: Figure(value, projection["distance_95"][name]) for name, value in projection["distance"].items()}
    far = {f"toward {side}": near.pop(f"instructed toward {side}") for side in SIDES}
    cosine = figure(projection, "cosine")
    opposite = cosine.interval is not None and cosine.interval[1] < 0
    further = all(_is_below(first, second) for first in near.values() for second in far.values())
    ours = far | near | {"cosine of the two ways": cosine}
    return Found.of(ours, opposite and further, report["info"]["samples"])


def layers(report: Json) -> Found:
    """Read row 21."""
    scores = report["info"]["score"]
    best = max(range(len(scores)), key=scores.__getitem__)
    n = report["info"]["samples"]
    ours = {str(layer): Figure(score, _of_variation(score, n)) for layer, score in enumerate(scores)}
    ends = ours["0"], ours[str(len(scores) - 1)]
    between = all(scores[best] >= 1.5 * end.value and _is_below(end, ours[str(best)]) for end in ends)
    return Found.of(ours, between, n)


def _of_variation(score: float, n: int) -> tuple[float, float] | None:
    """Return the 95 % interval of mean / deviation of n values, assuming a normal distribution.

    The logarithm of the ratio has about the variance 1 / (2 (n - 1)) + 1 / (n score^2) (delta method).
    """
    if n < 2 or score <= 0:
        return None
    beyond = 1.96 * math.sqrt(1 / (2 * (n - 1)) + 1 / (n * score**2))
    return score * math.exp(-beyond), score * math.exp(beyond)


def attention_by_layer(report: Json) -> Found:
    """Read row 22: the text context's share in the layers behind the steered ones."""
    instructed, steered = (_text_by_layer(report["conditions"][name]) for name in ("instruct_text", "text"))
    behind = range(max(report["about"]["layers"]) + 1, len(steered))
    ours = {
        f"{layer}, {words}": shares[layer]
        for layer in behind
        for words, shares in (("instructed", instructed), ("steered", steered))
    }
    more = bool(ours) and all(_is_below(instructed[layer], steered[layer]) for layer in behind)
    least = min((instructed[layer].value for layer in behind), default=0.0)
    nothing = f"ceiling: instructed, the text has at least {least:.3f} in each of them" if least >= CEILING else ""
    return Found.of(ours, more, report["conditions"]["text"]["n"], nothing)


def _text_by_layer(condition: Json) -> list[Figure]:
    """Return the text's share of the attention to both contexts, by layer."""
    intervals = condition.get("attention_by_layer_95") or [None] * len(condition["attention_by_layer"])
    return [
        Figure(1 - ratio, bounds and (1 - bounds[1], 1 - bounds[0]))
        for ratio, bounds in zip(condition["attention_by_layer"], intervals, strict=True)
    ]


def case(report: Json) -> Found:
    """Read row 23."""
    rows = {words: report["conditions"][name] for words, name in (
        ("instructed", "instruct_text"), ("steered", "text"), ("both", "both_text"),
    )}  # fmt: skip
    ours = {words: figure(row, "s_text") for words, row in rows.items()}
    return Found.of(ours, _is_below(ours["instructed"], ours["both"]), report["about"]["samples"])


def _is_below(low: Figure, high: Figure) -> bool:
    """Return whether the interval of one lies below that of the other; False without an interval."""
    return low.interval is not None and high.interval is not None and low.interval[1] < high.interval[0]


def direction(report: Json) -> Found:
    """Read row 24."""
    info = report["info"]
    return Found(info["agreement"][report["layers"][0]], info["reliable"], n=info["samples"])


def weight(report: Json) -> Found:
    """Read row 25: both readings of both magnitudes at the chosen layer, and the one that was used against the states."""
    info, layer = report["info"], report["layers"][0]
    size, kind = info["recipe"]["size"], info["recipe"]["states"]
    states, lengths = info["magnitudes"]["states"], info["magnitudes"]["direction"]
    ours = {
        f"{states_of} states, {of}": states[states_of][layer] / lengths[of][layer]
        for states_of in states
        for of in lengths
    }
    published = report["weight"][layer] / info["published"]
    return Found(ours, math.isclose(published, ours[f"{kind} states, {size}"], rel_tol=0.01), n=info["samples"])


def lens(report: Json) -> Found:
    """Read row 28."""
    rows = {name: margin["surfaces"] for name, margin in report["lens"].items() if name.startswith("plain_")}
    steered = report["about"]["layers"]
    near = all(
        layer is not None and min(abs(layer - steered_layer) for steered_layer in steered) <= 1
        for layer in rows.values()
    )
    ours = {f"preferring {name.removeprefix('plain_')}, surfaces": layer for name, layer in rows.items()}
    return Found(ours | {"steered": ", ".join(map(str, steered))}, near, n=sum(
        margin["n"] for name, margin in report["lens"].items() if name in rows
    ))  # fmt: skip
