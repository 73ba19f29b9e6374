"""Precision: the self-check on this device in each dtype, and the distance of half precision from float32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from steering.bench.asking import chat, noise
from steering.bench.rows import Gauge
from steering.bench.shapes import PATCH, SHAPES, random_model
from steering.bench.trial import Trial
from steering.errors import UnsupportedModel
from steering.front.engine import Engine
from steering.logprobs import TokenLogprob
from steering.protocol.request import Request, Sampling
from steering.runner.selfcheck import check_model

ANSWER = "the red star is left of the blue heart and the green circle is at the top of the picture " * 2
"""The answer that is forced in every dtype."""


def precision(trial: Trial) -> Iterator[Gauge]:
    """Run the self-check in every dtype; compare the likeliest tokens of one answer and log-probabilities with float32."""
    shape = SHAPES["tiny" if trial.shape == "tiny" else "small"]
    exact = random_model(shape, trial.place, torch.float32)
    weights = exact.model.state_dict()
    columns, rows = shape.image
    picture = noise((PATCH * columns, PATCH * rows))
    request = Request(chat("what is here?", picture), Sampling(logprobs=5), forced=ANSWER)
    choices_logprobs: dict[torch.dtype, tuple[TokenLogprob, ...]] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mllm = exact if dtype == torch.float32 else random_model(shape, trial.place, dtype, weights=weights)
        name = str(dtype).removeprefix("torch.")
        try:
            check_model(mllm)
            yield Gauge("precision", f"self-check in {name}, model {shape.name}", "passed")
        except UnsupportedModel as reason:
            yield Gauge("precision", f"self-check in {name}, model {shape.name}", "failed", note=str(reason))
        engine = Engine(mllm, slots=1, max_length=shape.length + 64, self_check=False)
        (choice,) = engine.generate([request])[0].choices
        choices_logprobs[dtype] = choice.logprobs or ()
        if dtype != torch.float32:
            yield from _compare(name, choices_logprobs[torch.float32], choices_logprobs[dtype])


def _compare(name: str, exact: tuple[TokenLogprob, ...], got: tuple[TokenLogprob, ...]) -> Iterator[Gauge]:
    """Compare two readings of the same tokens."""
    pairs = list(zip(exact, got, strict=True))
    same = sum(first.top[0].token_id == second.top[0].token_id for first, second in pairs) / len(pairs)
    apart = max(abs(first.logprob - second.logprob) for first, second in pairs)
    yield Gauge(
        "precision", f"{name}: likeliest token as in float32", 100 * same, "% of the tokens", f"of {len(pairs)}"
    )
    yield Gauge(
        "precision",
        f"{name}: log-probabilities off float32's",
        apart if math.isfinite(apart) else None,
        "nats at most",
        "" if math.isfinite(apart) else "not finite",
    )
