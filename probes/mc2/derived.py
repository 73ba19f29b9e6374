"""Results that follow from the samples and existing answers, without further questions.

Source: modality-preference paper, Figure 3 left, Tables 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from probes.conflicts.samples import ConflictSample
from probes.conflicts.shares import Outcome
from probes.harness.bootstrap import RESAMPLES, bounds, spearman
from probes.mc2.evaluate import RATIO, Evaluation

SIZES = (5, 10, *range(25, 251, 25))
"""The numbers of samples of each task: those of Table 6 behind two for small sets."""

SETTLED = 0.02
"""The difference to the Vision Ratio of all samples below which a ratio is settled."""

LEAST = 3
"""The least number of pairs for a correlation."""

ALIKE = ("plain", "instruct_vision", "instruct_text", "vision", "text")
"""Conditions with prompts that differ in at most one sentence, so that shares of attention compare."""


def words(samples: Sequence[ConflictSample]) -> dict[str, float]:
    """Return Table 4: the mean number of words of a text context by task.

    A word is anything between spaces, which gives the paper's figures for its own samples.
    """
    counts: dict[str, list[int]] = {}
    for sample in samples:
        counts.setdefault(sample.task, []).append(len(sample.context.split()))
    return {task: float(np.mean(counts[task])) for task in sorted(counts)}


@dataclass(frozen=True)
class Sizes:
    """Vision Ratios of smaller evaluations.

    rows: by samples of each task, the mean over draws and the bounds of the middle 95 % of them. settled: the least size
    from which on these bounds are within SETTLED of the ratio of all; None if only all samples settle it. most: the number
    of samples of the smallest task.
    """

    rows: Mapping[int, tuple[float, tuple[float, float]]]
    settled: int | None
    most: int

    def to_json(self) -> dict[str, Any]:
        rows = {
            str(size): {"vision_ratio": mean, "vision_ratio_95": list(between)}
            for size, (mean, between) in self.rows.items()
        }
        return {"rows": rows, "settled": self.settled, "most": self.most}


def by_size(
    outcomes: Sequence[Outcome], tasks: Sequence[str], sizes: Iterable[int] = SIZES, *, seed: int = 0
) -> Sizes | None:
    """Return Table 6 of existing answers: samples of each task are drawn without replacement, RESAMPLES times.

    The greatest size is that of the smallest task, unless that is all samples. None if no answer follows a side, or there
    is no smaller size.
    """
    task_names = np.array(tasks)
    parts = [np.array([["vision", "text"].index(o) if o != "others" else 2 for o in outcomes])[task_names == task]
             for task in sorted(set(tasks))]  # fmt: skip
    most = min(map(len, parts))
    generator = np.random.default_rng(seed)
    followed = np.zeros((2, RESAMPLES, most))
    for part in parts:
        drawn = part[generator.permuted(np.tile(np.arange(len(part)), (RESAMPLES, 1)), axis=1)[:, :most]]
        followed += np.stack([(drawn == side).cumsum(1) for side in (0, 1)])
    vision, decided = followed[0], followed.sum(0)
    rows = {}
    whole = most * len(parts) == len(outcomes)
    for size in sorted({size for size in sizes if size < most} | ({most} if not whole else set())):
        has_decisions = decided[:, size - 1] > 0
        if has_decisions.any():
            ratios = vision[has_decisions, size - 1] / decided[has_decisions, size - 1]
            rows[size] = float(ratios.mean()), bounds(ratios)
    decided_in_all = sum(outcome != "others" for outcome in outcomes)
    if not decided_in_all or not rows:
        return None
    overall = outcomes.count("vision") / decided_in_all
    near = [max(abs(end - overall) for end in between) <= SETTLED for _, between in rows.values()]
    return Sizes(rows, next((size for i, size in enumerate(rows) if size < most and all(near[i:])), None), most)


def attention(evaluation: Evaluation) -> dict[str, Any]:
    """Return Figure 3, left: Spearman's rank correlation of attention ratio and Vision Ratio.

    It is over the tasks as they are asked plainly, and over the comparable conditions (ALIKE). None if fewer than LEAST
    pairs are known.
    """
    conditions = evaluation.conditions
    pairs: dict[str, list[tuple[float | None, float | None]]] = {
        "conditions": [
            (conditions[name].attention_ratio, conditions[name].shares.vision_ratio)
            for name in ALIKE
            if name in conditions
        ]
    }
    if plain := conditions.get("plain"):
        pairs["tasks"] = [
            (plain.within.get(task, {}).get(RATIO), shares.vision_ratio) for task, shares in plain.by_task.items()
        ]
    complete = {name: [pair for pair in values if None not in pair] for name, values in pairs.items()}
    return {
        name: {"spearman": spearman(*np.array(values, float).T) if len(values) >= LEAST else None, "n": len(values)}
        for name, values in complete.items()
    }
