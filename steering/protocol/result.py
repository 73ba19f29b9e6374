"""The answers of a request, whole and in pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from steering.errors import Fault
from steering.tools.calls import CallPiece, ToolCall


@dataclass(frozen=True)
class TokenLogprob:
    """A generated token with its log-probability (nats) and the most likely alternatives, best first."""

    token_id: int
    token: str
    bytes: tuple[int, ...]
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class PromptToken:
    """A token of a prompt: its log-probability behind those before it, with the likeliest, and its rank, from 1."""

    scored: TokenLogprob
    rank: int


@dataclass(frozen=True)
class Timing:
    """Times of an answer in seconds of the monotonic clock: queued, admitted to a slot, first token, last token."""

    queued: float
    admitted: float
    first: float
    last: float


@dataclass(frozen=True)
class Choice:
    """A finished answer, whose text leaves out its tool calls.

    `finish_reason` is "stop", "length" or "tool_calls"; `stop_string` ended it, if any. `prompt_logprobs` are those of the
    prompt's tokens from the second one on. `applied` and `diagnostics` follow
    the wire protocol. `measured` holds captured tensors on the CPU, by recorder and intervention; `timing` holds its times.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...] | None = None
    applied: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    baseline: Choice | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    timing: Timing | None = field(default=None, compare=False)
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    prompt_logprobs: tuple[PromptToken, ...] | None = None

    @property
    def states(self) -> torch.Tensor | None:
        """The residual stream after each layer at the requested token of the prompt, (layers, d) float32."""
        return self._of("prompt_state", "states")

    @property
    def next_logprobs(self) -> torch.Tensor | None:
        """The log-probabilities (nats) of the first token, before sampling, (vocabulary,); present with the states."""
        return self._of("prompt_state", "next_logprobs")

    @property
    def divergence(self) -> torch.Tensor | None:
        """The divergence in nats, (layers, prompt tokens); see `interventions.think`."""
        return self._of("sage.think", "divergence")

    @property
    def answer_states(self) -> torch.Tensor | None:
        """The states of the answer, (2, layers, d), where drift or residual is read out.

        As `states`: the mean over the rows that generated the answer's tokens, and at the last of them.
        """
        return self._of("residual", "states")

    @property
    def reply_logprobs(self) -> torch.Tensor | None:
        """The log-probabilities (nats) of the reply's tokens, (tokens,) float32."""
        value: torch.Tensor | None = self.measured.get("reply")
        return value

    def _of(self, name: str, tensor: str) -> torch.Tensor | None:
        value: torch.Tensor | None = getattr(self.measured.get(name), tensor, None)
        return value


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer; the last piece of a choice carries the finished `choice`."""

    index: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: Choice | None = None
    calls: tuple[CallPiece, ...] = ()


@dataclass(frozen=True)
class Result:
    """A finished request: its choices in order of index, and token counts without baselines.

    `cached_tokens` are the prompt's tokens that came from a cache.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @classmethod
    def of(cls, choices: Mapping[int, Choice], n: int, prompt_tokens: int, cached_tokens: int) -> Result:
        """Return the result of `n` choices by index; raise Fault where some of them never came."""
        if len(choices) < n:
            raise Fault("The request was cancelled.")
        generated = sum(len(choice.token_ids) for choice in choices.values())
        return cls(tuple(choices[index] for index in sorted(choices)), prompt_tokens, generated, cached_tokens)
