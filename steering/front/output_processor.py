"""The output processor: turns the tokens and measurements of a request into text, calls, reports and readouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from steering.errors import Fault, panics_raise
from steering.front.reasoning import reasoning_tokens
from steering.logprobs import PromptToken, TokenLogprob, TopLogprobs
from steering.messages.messages import Add, Ended, Output
from steering.model.mllm import MLLM
from steering.prompt.fitting import Shrunk
from steering.prompt.layout import Layout
from steering.protocol.intervention import applied
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.readout import FinishedAnswer, ReadoutContext
from steering.protocol.request import Choice, Chunk
from steering.protocol.text import Text, TextStream
from steering.readouts.envelope import envelope
from steering.tools.calls import CallStream

PROMPT_LOGPROBS = "prompt_logprobs"
"""The name of the recorder of these, with four tensors: log-probabilities, ranks, the likeliest ids, and theirs."""
END = 8
"""Tokens of the prompt's end whose text is kept."""


class OutputProcessor:
    """Turns the outputs of one request into chunks and choices; one thread feeds it.

    token_text: returns the text and the bytes of a token. calls: for the text that a prompt ends with, splits an answer into
    text and calls, where it may call tools.
    """

    def __init__(
        self,
        mllm: MLLM,
        request: Add,
        context: ReadoutContext,
        token_text: Callable[[int], Text],
        calls: Callable[[str], CallStream] | None,
    ):
        spec, baseline = request.spec, request.baseline_prompt or request.spec.prompt
        self.n, self.prompt_tokens, self.max_tokens = request.n, spec.prompt.length, spec.max_tokens
        # What follows a grammar from its first token on continues no reasoning, even if the template has begun one.
        self.prompt_end: str = "" if request.grammar else mllm.tokenizer.decode(spec.prompt.ids[-END:])
        """The text of the prompt's last tokens, special ones included; "" where the answer does not continue it."""
        self._tokenizer, self._reasoning = mllm.tokenizer.backend_tokenizer, mllm.chat.reasoning
        self._asked, self._diagnose, self._sampling = spec.asked, spec.diagnose, spec.sampling
        self._context, self._token_text, self._calls = context, token_text, calls
        self._stop_ids = frozenset() if spec.sampling.ignore_eos else mllm.stop_ids
        self._answers = [
            _Answer(
                prompt.ids,
                prompt.layout,
                prompt.shrunk,
                request.text_stream(mllm.tokenizer),
                None if calls is None else calls(self.prompt_end),
            )
            for prompt in (*[spec.prompt] * request.n, *[baseline] * (request.n * request.baseline))
        ]
        self._held: dict[int, Chunk] = {}  # the last chunk of a choice whose baseline has not ended
        self.choices: dict[int, Choice] = {}
        self.cached_tokens = 0
        """Tokens of the prompt that came from a cache; known with the first token."""

    def feed(self, output: Output) -> Chunk | None:
        """Process an output and return the next chunk of a choice; None where nothing can be shown yet.

        The last chunk of a choice comes once its baseline has ended, too. Raises the error of an answer that failed.
        """
        ended = output.ended
        if ended is not None and ended.error is not None:
            raise ended.error
        answer = self._answers[output.answer]
        if output.answer == 0 and output.reused:
            self.cached_tokens = output.reused
        with panics_raise(lambda panic: Fault(f"The tokenizer panicked: {panic}")):
            text = self._read(answer, output)
        index, finished = output.answer % self.n, ended is not None and ended.reason is not None
        if finished:
            answer.ended = ended
        logprobs = self._logprobs(answer, output)
        if output.answer < self.n:
            chunk = answer.chunk(index, text, logprobs, finished)
            if not finished:
                return chunk if chunk.text or chunk.logprobs or chunk.calls else None
            self._held[index] = chunk
        both = self._answers[index :: self.n]
        if index not in self._held or any(reply.ended is None for reply in both):
            return None
        choice = self.choices[index] = self._choice(both[0], index, both[1] if len(both) > 1 else None)
        return replace(self._held.pop(index), choice=choice)

    def generated(self, index: int) -> int:
        """Return how many tokens choice `index` has so far."""
        return len(self._answers[index].tokens)

    def text(self, index: int) -> str:
        """Return the text of choice `index` so far."""
        text = self._answers[index].text.text
        return text if self._calls is None else self._calls(self.prompt_end).feed(text, False)[0]

    def _read(self, answer: _Answer, output: Output) -> str:
        """Return the text that new tokens add."""
        pieces = []
        for token in output.tokens:
            answer.tokens.append(token)
            if token not in self._stop_ids:
                pieces.append(answer.text.feed(token))
        if output.ended is not None and output.ended.reason is not None:
            pieces.append(answer.text.finish())
        return "".join(pieces)

    def _logprobs(self, answer: _Answer, output: Output) -> tuple[TokenLogprob, ...]:
        logprobs = () if output.logprobs is None else tuple(self._named(output.tokens, output.logprobs))
        answer.logprobs += logprobs
        return logprobs

    def _named(self, tokens: Sequence[int], logprobs: TopLogprobs) -> Iterator[TokenLogprob]:
        named = tokens[: len(logprobs)]  # a token that ends the answer has none
        for token, (logprob, top) in zip(named, logprobs, strict=True):
            yield TokenLogprob(token, *self._token_text(token), logprob, self._top(top))

    def _choice(self, answer: _Answer, index: int, baseline: _Answer | None) -> Choice:
        ended, text, calls = answer.ended, answer.text.text, []
        assert ended is not None
        reason = ended.reason or ""
        if self._calls is not None:
            parts = self._calls(self.prompt_end)
            parts.feed(text, last=True, cut_off=answer.cut_off)
            text, calls = parts.text, parts.calls
            if calls and reason == "stop" and not parts.cut:  # a stop string may have cut a call short
                reason = "tool_calls"
        is_baseline = answer in self._answers[self.n :]
        return Choice(
            index=index,
            text=text,
            token_ids=tuple(answer.tokens),
            finish_reason=reason,
            logprobs=None if self._sampling.logprobs is None else tuple(answer.logprobs),
            applied=self._applied(answer, {} if is_baseline else self._asked),
            diagnostics=self._diagnostics(answer, baseline),
            baseline=None if baseline is None else self._choice(baseline, index, None),
            measured=ended.taken,
            tool_calls=tuple(calls),
            timing=ended.timing,
            stop_string=answer.text.stop_string,
            prompt_logprobs=self._prompt_logprobs(answer),
            reasoning_tokens=self._reasoning_tokens(answer),
        )

    def _reasoning_tokens(self, answer: _Answer) -> int:
        if self._reasoning is None:
            return 0
        return reasoning_tokens(self._tokenizer, answer.tokens, self._reasoning, self.prompt_end)

    def _prompt_logprobs(self, answer: _Answer) -> tuple[PromptToken, ...] | None:
        scores = None if answer.ended is None else answer.ended.taken.get(PROMPT_LOGPROBS)
        if scores is None:
            return None
        tokens = zip(answer.ids[1:].tolist(), *(tensor.tolist() for tensor in scores), strict=True)
        return tuple(
            PromptToken(
                TokenLogprob(token, *self._token_text(token), logprob, self._top(zip(ids, values, strict=True))), rank
            )
            for token, logprob, rank, ids, values in tokens
        )

    def _top(self, likeliest: Iterable[tuple[int, float]]) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(token, *self._token_text(token), logprob) for token, logprob in likeliest)

    def _applied(self, answer: _Answer, interventions: Mapping[str, InterventionSpec]) -> dict[str, Any] | None:
        """Return what interventions did, and which pictures were scaled down; None where nothing was done."""
        assert answer.ended is not None
        pictures = [picture.report() for picture in answer.shrunk]
        report = applied(interventions, answer.ended.taken) or {}
        return report | ({"pictures": pictures} if pictures else {}) or None

    def _diagnostics(self, answer: _Answer, baseline: _Answer | None) -> dict[str, Any] | None:
        if self._diagnose is None or answer.ended is None:
            return None
        ended, compared = answer.ended, None if baseline is None else baseline.ended
        return envelope(
            FinishedAnswer(
                answer.layout,
                self._diagnose,
                answer.tokens,
                ended.fed,
                ended.taken,
                self._context,
                None if compared is None else compared.taken,
                ended.scores,
            )
        )


@dataclass(eq=False)
class _Answer:
    """The state of one answer."""

    ids: torch.Tensor
    layout: Layout
    shrunk: tuple[Shrunk, ...]
    text: TextStream
    calls: CallStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def cut_off(self) -> bool:
        """True if the answer ended where the model did not end it."""
        return self.ended is not None and (self.ended.reason == "length" or self.text.stopped)

    def chunk(self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], last: bool) -> Chunk:
        """Return new text as a chunk of a choice, split into plain text and calls."""
        if self.calls is None:
            return Chunk(index, text, logprobs)
        plain, calls = self.calls.feed(text, last, self.cut_off)
        return Chunk(index, plain, logprobs, calls=calls)
