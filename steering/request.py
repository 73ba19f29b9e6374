"""What a caller asks of the engine and what it gets back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steering.diagnostics.options import Diagnose
from steering.errors import RequestError
from steering.interventions.contrast import Contrast
from steering.interventions.sage import Sage
from steering.interventions.steer import Steer

MAX_TOP_LOGPROBS = 20
COLDEST = 1e-5
"""A temperature below which answers are greedy: logits divided by less leave float32, and what is likeliest stays so."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen and when to stop. `temperature` 0, or below `COLDEST`, is greedy; `top_k` 0,
    `top_p` 1, `min_p` 0 are off.

    `logprobs` is None (off) or how many alternatives (0..20) to report per token; log-probabilities are those of the
    model's distribution (interventions included), before temperature, penalties, bias and truncation.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("top_k", self.top_k, 0, 1_000_000)
        if self.max_tokens is not None:
            _within("max_tokens", self.max_tokens, 1, 10_000_000)
        if self.logprobs is not None:
            _within("top_logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None:
            _within("seed", self.seed, -(2**63), 2**63 - 1)
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -100.0, 100.0)
        if any(not stop for stop in self.stop):
            raise RequestError("'stop' must not contain an empty string.", param="stop")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < COLDEST


def _within(name: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    """Raise RequestError unless `value` is finite and in [low, high] (or (low, high])."""
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        raise RequestError(
            f"'{name}' must be {'above' if open_low else 'at least'} {low} and at most {high}; got {value}.", param=name
        )


@dataclass(frozen=True)
class Request:
    """One chat with its interventions.

    `messages` follow the Hugging Face chat format: `{"role", "content"}` where content is a string or a list of parts
    `{"type": "text", "text": str, "span": "context" (optional)}` and `{"type": "image", "image": PIL.Image}`.
    `n` answers are generated; `baseline` adds, in the same batch, each answer without interventions; `states` returns
    the residual stream after each layer at one of the prompt's tokens, counted from its end (`state_position`, -1 the last
    one), and the distribution of the answer's first token; `divergence` how far the updates of every prompt token diverge in
    each layer (see `interventions.think`). `forced` tokens are generated whatever the model says, so that their
    log-probabilities can be read. A `reply` is read, not generated: the prompt ends with it, as the model's template renders
    an answer to the chat, and its tokens' log-probabilities come from the prefill.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling = field(default_factory=Sampling)
    steering: tuple[Steer, ...] = ()
    sage: Sage | None = None
    contrast: Contrast | None = None
    diagnose: Diagnose | None = None
    n: int = 1
    baseline: bool = False
    states: bool = False
    state_position: int = -1
    divergence: bool = False
    forced: tuple[int, ...] = ()
    reply: str | None = None


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token with its log-probability (nats) and the most likely alternatives, best first."""

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Choice:
    """One finished answer. `finish_reason` is "stop" or "length"; `applied` and `diagnostics` follow the wire protocol.

    `states` is (layers, d) float32 on the CPU: the residual stream after each layer at that token of the prompt.
    `next_logprobs`, with them, is (vocabulary,): the log-probabilities (nats) of the first token, before sampling.
    `divergence` is (layers, prompt tokens), in nats. `answer_states`, where drift is read out, is (2, layers, d): as
    `states`, the mean over the rows that generated the answer's tokens, and at the last of them. `reply_logprobs` is
    (tokens of the request's reply,) float32, in nats.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    applied: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    baseline: Choice | None = None
    states: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    next_logprobs: torch.Tensor | None = None
    answer_states: torch.Tensor | None = None
    reply_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; the last piece of a choice carries the finished `choice`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: Choice | None = None


@dataclass(frozen=True)
class Result:
    """A finished request: its choices in order of index, and token counts (baselines not counted)."""

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
