"""Readouts of faithful and unfaithful answers that are forced through a model.

Source: SPD-Faith Bench paper, sections 4.2 and 4.3, appendix D.2 to D.4.

Each sample has both answers, so pairs are compared: for every readout the mean of either side and the mean difference,
unfaithful minus faithful, with its 95 % interval over samples. A model also prefers what it generates; given answers
separate the content from that preference, which their log-probabilities show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from probes.answering.base import Answerer, Question, Reply
from probes.answering.replies import replies
from probes.faithfulness.samples import ForcedAnswerSample
from probes.harness.bootstrap import interval
from probes.image_pairs.traces import Trace, alike, traces
from steering import Diagnose, Engine

SIDES = ("faithful", "unfaithful")
READ = Diagnose(frozenset({"decay", "decay_layers", "residual", "flags"}))
LAYERED = ("mha_cosine", "ffn_cosine", "mha_norm", "ffn_norm", "update_norm", "kl", "neuron_ratio", "gate_ratio")
"""The numbers that `residual` has for every layer."""
SPANS = ("vision", "system", "user")
MAPS = ("attention", "activation", "agreement")
"""The numbers of `flags` on the maps: the share of each in its strongest fifth, and their correlation."""
LEAST = 0.5
"""The least share of answers that must be long enough for a step to be in a curve.

With fewer, a step would be a mean over other answers than the one before.
"""

By = Mapping[str, Sequence[Reply]]
"""The replies to the samples, in their order, by side."""


def read(answerer: Answerer, samples: Sequence[ForcedAnswerSample], *, quiet: bool = False) -> dict[str, list[Reply]]:
    """Force both answers to every question, and read them."""

    def questions() -> Iterator[Question]:
        for sample in samples:
            for side in SIDES:
                yield Question(sample.chat(), diagnose=READ, logprobs=True, force=getattr(sample, side))

    parts = [f"{side} answers" for _ in samples for side in SIDES]
    answers = list(replies(answerer, questions(), parts, title="Given answers", quiet=quiet))
    return {side: answers[number :: len(SIDES)] for number, side in enumerate(SIDES)}


def compared(answers: By) -> dict[str, Any]:
    """Return the readouts by layer and by step, of either side, and their difference."""
    residual = {side: [(reply.diagnostics or {}).get("residual", {}) for reply in answers[side]] for side in SIDES}
    decay = {side: [(reply.diagnostics or {}).get("decay", {}) for reply in answers[side]] for side in SIDES}
    by_layer = {name: _paired(residual, itemgetter(name)) for name in LAYERED}
    scalars = {
        "logprob": {side: _moments(np.array([_mean_logprob(reply) for reply in answers[side]])) for side in SIDES},
        "vision_slope": _paired(decay, lambda readout: [readout["slope"]]),
        "vision_share": _paired(decay, lambda readout: [float(np.mean(readout["vision"]))]),
    }
    shares = {span: _paired(decay, partial(_by_layer, span)) for span in SPANS}
    maps = [((reply.diagnostics or {}).get("flags") or {}).get("concentration", {}) for reply in answers["faithful"]]
    preferred = preferences(answers)
    return {
        "samples": len(preferred),
        "prefers_faithful": float(np.mean(preferred)),
        "by_layer": by_layer,
        "scalars": scalars,
        "shares_by_layer": shares,
        "maps": {name: _moments(np.array([_number(values.get(name)) for values in maps])) for name in MAPS},
        "decay": {side: decay_curve(answers[side]) for side in SIDES},
    }


def preferences(answers: By) -> list[bool]:
    """Return for each sample whether the faithful answer is the likelier one as a whole."""
    return [_sum_logprob(a) > _sum_logprob(b) for a, b in zip(*(answers[side] for side in SIDES), strict=True)]


def _by_layer(span: str, readout: Mapping[str, Any]) -> list[float | None]:
    """Return the mean over steps of a span's share in every layer."""
    steps = readout["by_layer"][span]
    return [None] * len(steps[0]) if any(None in step for step in steps) else np.mean(steps, 0).tolist()


def _number(value: float | None) -> float:
    return np.nan if value is None else value


def _mean_logprob(reply: Reply) -> float:
    return float(np.mean(reply.logprobs or [np.nan]))


def _sum_logprob(reply: Reply) -> float:
    return float(np.sum(reply.logprobs or [np.nan]))


def _paired(
    readouts: Mapping[str, Sequence[Mapping[str, Any]]], value: Callable[[Mapping[str, Any]], Sequence[float | None]]
) -> dict[str, Any] | None:
    """Return means (layers,) of either side, and the mean difference with its interval in every layer.

    None if an answer lacks such numbers. readouts: one of every answer, by side.
    """
    sides = [[value(readout) for readout in readouts[side]] for side in SIDES]
    if any(None in row for side in sides for row in side):
        return None
    faithful, unfaithful = (np.array(side, dtype=float) for side in sides)
    change = unfaithful - faithful
    return {
        "faithful": faithful.mean(0).tolist(),
        "unfaithful": unfaithful.mean(0).tolist(),
        "difference": change.mean(0).tolist(),
        "difference_95": [list(interval(layer)) for layer in change.T],
    }


def _moments(values: np.ndarray) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {"mean": None, "mean_95": None}
    return {"mean": float(finite.mean()), "mean_95": list(interval(finite))}


def decay_curve(answers: Sequence[Reply]) -> dict[str, Any]:
    """Return the mean shares of attention by generated token (Figure 7), up to the steps that LEAST of the answers reach."""
    of = [reply.diagnostics["decay"] for reply in answers if reply.diagnostics]
    lengths = [len(shares["vision"]) for shares in of]
    steps = int(np.quantile(lengths, 1 - LEAST, method="lower")) if lengths else 0
    curve: dict[str, Any] = {"steps": steps}
    for span in SPANS:
        reached = [[shares[span][step] for shares in of if len(shares[span]) > step] for step in range(steps)]
        curve[span] = [float(np.mean(values)) for values in reached]
    curve["answers"] = [sum(length > step for length in lengths) for step in range(steps)]
    return curve


def apart(engine: Engine, samples: Sequence[ForcedAnswerSample]) -> dict[str, Any]:
    """Return the similarity of the faithful and the unfaithful answer to a question in every layer.

    It is the cosine similarity of the mean states of their rows (section 4.3); the control is that of two faithful answers
    to different questions of one kind. Both are (layers,) means with their intervals.
    """
    side_traces = {
        side: list(traces(engine, ((sample.chat(), getattr(sample, side)) for sample in samples))) for side in SIDES
    }
    kinds: dict[str, list[Trace]] = {}
    for sample, trace in zip(samples, side_traces["faithful"], strict=True):
        kinds.setdefault(sample.kind, []).append(trace)
    similarities = {
        "same question": list(map(alike, *side_traces.values())),
        "other questions": [alike(a, b) for own in kinds.values() for a, b in pairwise(own)],
    }
    return {
        name: {"mean": np.mean(rows, 0).tolist(), "mean_95": [list(interval(layer)) for layer in np.transpose(rows)]}
        for name, rows in similarities.items()
        if rows
    }


def separated(answers: By, *, seed: int = 0) -> dict[str, Any]:
    """Return by readout how well it separates the two sides, in the layer that separates them best.

    `share` is the share of pairs in which the unfaithful answer has the greater value (0.5: no separation), with its
    interval. The layer is chosen on one half of the samples, and the share measured on the other.
    """
    out: dict[str, Any] = {}
    for name in LAYERED:
        rows = [
            np.array([reply.diagnostics["residual"][name] for reply in answers[side] if reply.diagnostics], dtype=float)
            for side in SIDES
        ]
        if len(rows[0]) < 4 or rows[0].shape != rows[1].shape:
            continue
        greater = (rows[1] > rows[0]) + 0.5 * (rows[1] == rows[0])
        order = np.random.default_rng(seed).permutation(len(greater))
        chosen, tested = np.array_split(order, 2)
        layer = int(np.abs(greater[chosen].mean(0) - 0.5).argmax())
        shares = greater[tested, layer]
        out[name] = {
            "layer": layer,
            "share": float(shares.mean()),
            "share_95": list(interval(shares)),
            "n": len(shares),
        }
    return out
