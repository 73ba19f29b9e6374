"""MM-SAP's three parts, asked under several conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Answerer, Chat, Reply
from probes.harness.comparison import PartAnswered, SampleSet, Way, ask_all, measured
from probes.mmsap import scoring
from probes.mmsap.samples import PARTS, SapSample, questions_per_run

MAX_TOKENS = 24
TOTAL = "total"
"""The three parts together, and by part."""

Parts = Sequence[PartAnswered[SapSample]]


def evaluate(
    answerer: Answerer,
    conditions: Mapping[str, Way],
    samples: Sequence[SapSample],
    runs: int,
    seed: int,
    quiet: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scores by condition, and their spread over the runs by condition and part.

    The scores are "basic", "know" and "beyond" by subtask and `TOTAL` by part, as `measured` returns them. The spread is
    each metric's `mean` and `deviation` over the runs, with the share in each of the `runs`, and the number of `refusals`.
    """

    def chats(sample: SapSample) -> list[Chat]:
        return sample.chats(runs, seed)

    def tally(sample: SapSample, replies: Sequence[Reply]) -> dict[str, float]:
        return scoring.tally(sample, replies, seed)

    parts = [
        SampleSet(
            part, [sample for sample in samples if sample.part == part], chats, tally, scoring.scores, scoring.SHARES,
            setting=lambda sample: sample.subtask, cluster=_picture, each=runs * questions_per_run(part),
        )
        for part in PARTS
    ]  # fmt: skip
    answers = ask_all(answerer, conditions, parts, max_tokens=MAX_TOKENS, quiet=quiet)
    with_total = {name: [*answered, _together(answered)] for name, answered in answers.items()}
    return measured(with_total), {
        name: {part.part.name: _by_run(part, seed) for part in now} for name, now in with_total.items()
    }


def _picture(sample: SapSample) -> Path | str:
    """Return a key that distinguishes a question's picture from others."""
    return sample.image if isinstance(sample.image, Path) else sample.id


def _together(answered: Parts) -> PartAnswered[SapSample]:
    """Combine all parts into one."""
    part = replace(
        answered[0].part,
        name=TOTAL,
        samples=[sample for part in answered for sample in part.part.samples],
        setting=lambda sample: sample.part,
    )
    replies = [about for part in answered for about in part.replies]
    return PartAnswered(part, replies, [tally for part in answered for tally in part.tallies])


def _by_run(answered: PartAnswered[SapSample], seed: int) -> dict[str, Any]:
    about = zip(answered.part.samples, answered.replies, strict=True)
    runs = [*zip(*(scoring.tallies(sample, replies, seed) for sample, replies in about), strict=True)]
    sums = [{name: np.array(sum(tally[name] for tally in run)) for name in run[0]} for run in runs]
    shares = [scoring.scores(sums_of_run) for sums_of_run in sums]
    refused = [int(sums_of_run["asked"] - sums_of_run["answered"]) for sums_of_run in sums]
    return {name: _spread([float(values[name]) for values in shares]) for name in scoring.SHARES} | {
        "refusals": _spread([float(count) for count in refused])
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and sample standard deviation of the runs in which a metric is defined."""
    defined = [value for value in values if not np.isnan(value)]
    return {
        "mean": float(np.mean(defined)) if defined else None,
        "deviation": float(np.std(defined, ddof=1)) if len(defined) > 1 else None,
        "runs": [None if np.isnan(value) else value for value in values],
    }
