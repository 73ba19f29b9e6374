"""The messages to and from an engine core: the same in its own process, from another process, and to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from steering.grammar.grammar import Grammar
from steering.logprobs import TopLogprobs
from steering.prompt.layout import Prompt
from steering.protocol.sequence import Spec
from steering.protocol.text import TextStream
from steering.timing import Timing


@dataclass(frozen=True)
class Add:
    """A request for `n` answers and, with `baseline`, for as many answers without interventions.

    number: identifies the request in all other messages. spec: the settings of its answers; each answer gets its own seed.
    baseline_prompt: the prompt of the baselines, None for that of `spec`. twin_prompt: the prompt of a contrast, where it is
    known before the model runs. grammar: constrains the answers. kept, before: arguments of `TextStream`, in whose text stop
    strings are searched. in_pieces: put out tokens as they come, otherwise when the answer ends. group: its owner; groups
    get slots in turns. waited: it goes before requests that have not waited. admitted: admission control does not refuse it.
    """

    number: int
    spec: Spec
    n: int = 1
    baseline: bool = False
    baseline_prompt: Prompt | None = None
    twin_prompt: Prompt | None = None
    grammar: Grammar | None = None
    kept: Mapping[int, str] = field(default_factory=dict)
    before: tuple[int, ...] = ()
    in_pieces: bool = True
    group: str = ""
    waited: bool = False
    admitted: bool = False

    def text_stream(self, tokenizer: Any) -> TextStream:
        """Return the text of an answer before its first token, with its stop strings."""
        sampling = self.spec.sampling
        return TextStream(tokenizer, sampling.stop, self.kept, self.before, sampling.min_tokens)

    @property
    def answers(self) -> int:
        """The number of its answers, baselines included."""
        return self.n * (1 + self.baseline)


@dataclass(frozen=True)
class Ended:
    """The end of an answer.

    reason: "stop" or "length"; None where it was aborted or failed with `error`. taken: its measurements, by recorder and
    intervention. scores: the log-probabilities of its tokens, where they were captured. fed: how many of its tokens went
    through the model.
    """

    reason: str | None
    error: BaseException | None
    timing: Timing
    taken: Mapping[str, Any] = field(default_factory=dict)
    scores: Sequence[float] = ()
    fed: int = 0


@dataclass(frozen=True)
class Output:
    """New tokens of an answer; the last output of an answer has `ended`.

    answer: the index of the answer; baselines follow the request's `n` answers. logprobs: those of the tokens, where the
    request asks for them; a token that ends the answer has none. first_at: time of the answer's first token on the monotonic
    clock, where it is among these, else 0. reused: how many of the prompt's tokens came from a cache, in the output in which
    that becomes known.
    """

    request: int
    answer: int
    tokens: Sequence[int] = ()
    logprobs: TopLogprobs | None = None
    first_at: float = 0.0
    reused: int = 0
    ended: Ended | None = None

    @property
    def aborted(self) -> bool:
        """True where the answer ended because its request was aborted."""
        return self.ended is not None and self.ended.reason is None and self.ended.error is None
