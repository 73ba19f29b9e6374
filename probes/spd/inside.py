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
    "cosine": lambda one, other: float(np.mean(alike(one, other))),
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
    for one in answered.values():
        contradict = [tally["contradictions"] > 0 for tally in one.tallies]
        own = list(_said(one))
        found = list(compress(own, contradict)), list(compress(own, (not given for given in contradict)))
        most = min(map(len, found))
        for kind, pairs in zip(KINDS, found, strict=True):
            chosen[kind] += pairs[:most]
    return {kind: _measured(engine, pairs) for kind, pairs in chosen.items()}


def _said(one: PartAnswered[PicturePair]) -> Iterator[Answers]:
    for pair, texts in zip(one.part.samples, one.answers, strict=True):
        yield tuple(zip(one.part.chats(pair), texts, strict=True))


def _measured(engine: Engine, pairs: list[Answers]) -> dict[str, Any]:
    left = traces(engine, (answer for pair in pairs for answer in pair))
    apart = list(zip(left, left, strict=True))
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name, number in NUMBERS.items():
        values = np.array([number(*both) for both in apart])
        known = {"value": float(values.mean()), "value_95": list(interval(values))} if len(values) else {}
        found[name] = known or {"value": None, "value_95": None}
    return found
