"""Traces of contradicting answers inside the model, compared with consistent ones (the released `eval_cosine.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import compress
from typing import Any

import numpy as np

from probes.answering.base import Chat
from probes.harness.bootstrap import interval
from probes.harness.comparison import PartAnswered
from probes.image_pairs.traces import Trace, alike, divergence, faithfulness, traces
from probes.spd.samples import PicturePair
from steering import Engine

KINDS = ("contradicting", "consistent")
NUMBERS: Mapping[str, Callable[[Trace, Trace], float]] = {
    "cosine": lambda first, second: float(np.mean(alike(first, second))),
    "last layer": lambda first, second: alike(first, second)[-1],
    "divergence": divergence,
    "faithfulness": faithfulness,
}
Answers = tuple[tuple[Chat, str], ...]
"""The answers to "same?" and "different?", each with its chat."""


def inside(engine: Engine, answered: Mapping[str, PartAnswered[PicturePair]]) -> dict[str, Any]:
    """Return by kind the number of pairs of answers, and the means of `NUMBERS` with their intervals.

    answered: the single set by condition; for each condition as many consistent pairs are read as contradicting ones, at
    most all of either.
    """
    chosen: dict[str, list[Answers]] = {kind: [] for kind in KINDS}
    for part in answered.values():
        contradict = [tally["contradictions"] > 0 for tally in part.tallies]
        answers = list(_answers(part))
        groups = (
            list(compress(answers, contradict)),
            list(compress(answers, (not is_contradicting for is_contradicting in contradict))),
        )
        most = min(map(len, groups))
        for kind, pairs in zip(KINDS, groups, strict=True):
            chosen[kind] += pairs[:most]
    return {kind: _measure(engine, pairs) for kind, pairs in chosen.items()}


def _answers(part: PartAnswered[PicturePair]) -> Iterator[Answers]:
    for pair, texts in zip(part.part.samples, part.answers, strict=True):
        yield tuple(zip(part.part.chats(pair), texts, strict=True))


def _measure(engine: Engine, pairs: list[Answers]) -> dict[str, Any]:
    stream = traces(engine, (answer for pair in pairs for answer in pair))
    apart = list(zip(stream, stream, strict=True))
    results: dict[str, Any] = {"pairs": len(pairs)}
    for name, number in NUMBERS.items():
        values = np.array([number(*pair) for pair in apart])
        summary = {"value": float(values.mean()), "value_95": list(interval(values))} if len(values) else {}
        results[name] = summary or {"value": None, "value_95": None}
    return results
