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
from probes.mmsap.samples import PARTS, SapSample, asked

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
            part, [one for one in samples if one.part == part], chats, tally, scoring.scores, scoring.SHARES,
            setting=lambda sample: sample.subtask, cluster=_picture, each=runs * asked(part),
        )
        for part in PARTS
    ]  # fmt: skip
    found = ask_all(answerer, conditions, parts, max_tokens=MAX_TOKENS, quiet=quiet)
    whole = {name: [*answered, _together(answered)] for name, answered in found.items()}
    return measured(whole), {name: {one.part.name: _by_run(one, seed) for one in now} for name, now in whole.items()}


def _picture(sample: SapSample) -> Path | str:
    """Return a key that distinguishes a question's picture from others."""
    return sample.image if isinstance(sample.image, Path) else sample.id


def _together(answered: Parts) -> PartAnswered[SapSample]:
    """Combine all parts into one."""
    part = replace(
        answered[0].part,
        name=TOTAL,
        samples=[sample for one in answered for sample in one.part.samples],
        setting=lambda sample: sample.part,
    )
    replies = [about for one in answered for about in one.replies]
    return PartAnswered(part, replies, [tally for one in answered for tally in one.tallies])


def _by_run(answered: PartAnswered[SapSample], seed: int) -> dict[str, Any]:
    about = zip(answered.part.samples, answered.replies, strict=True)
    runs = [*zip(*(scoring.tallies(sample, replies, seed) for sample, replies in about), strict=True)]
    sums = [{name: np.array(sum(one[name] for one in run)) for name in run[0]} for run in runs]
    shares = [scoring.scores(one) for one in sums]
    refused = [int(one["asked"] - one["answered"]) for one in sums]
    return {name: _spread([float(one[name]) for one in shares]) for name in scoring.SHARES} | {
        "refusals": _spread([float(one) for one in refused])
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    """Return mean and sample standard deviation of the runs in which a metric is defined."""
    known = [value for value in values if not np.isnan(value)]
    return {
        "mean": float(np.mean(known)) if known else None,
        "deviation": float(np.std(known, ddof=1)) if len(known) > 1 else None,
        "runs": [None if np.isnan(value) else value for value in values],
    }
