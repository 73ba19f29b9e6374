"""The caller's handle on a running request: the stream of chunks, the result, and cancellation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from steering.protocol.intervention import applied
from steering.protocol.readout import FinishedAnswer, Surroundings
from steering.protocol.request import Choice, Chunk, Result, Timing, TokenLogprob
from steering.protocol.sequence import Sequence
from steering.readouts.envelope import envelope
from steering.tools.calls import CallStream


class Completion:
    """The answers of one request, as `Engine.submit` returns them.

    Iterate it for chunks as they come, or take `result()`; one consumer only. Both wait for the stepping thread, and raise
    Fault when the request failed.
    """

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        n: int,
        baseline: bool,
        cancel: Callable[[Completion], None],
        around: Surroundings,
        parts: Callable[[], CallStream] | None = None,
    ):
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.sequences: list[Sequence] = []
        self._n = n
        self._has_baseline = baseline
        self._cancel = cancel
        self._around = around
        self._parts = parts  # splits an answer into text and calls, where it may call tools
        self._streams = [] if parts is None else [parts() for _ in range(n)]
        self._events: SimpleQueue[tuple[Sequence, str, list[TokenLogprob], bool] | None] = SimpleQueue()
        self._in_pieces = True
        self._resume: Callable[[], object] | None = None
        self._roles: dict[Sequence, tuple[int, bool]] = {}
        self._choices: dict[int, Choice] = {}

    def expect(self, sequence: Sequence, index: int, baseline: bool) -> None:
        """Register a sequence as choice `index`, or as that choice's baseline."""
        self.sequences.append(sequence)
        self._roles[sequence] = (index, baseline)

    def receive(self, sequence: Sequence, text: str, logprobs: list[TokenLogprob]) -> None:
        """Take a piece of an answer from the engine; the last call for a sequence comes when it is done."""
        if self._in_pieces or sequence.done:
            self._events.put((sequence, text, logprobs, sequence.finish_reason is not None))
            if self._resume is not None:
                self._resume()

    def cancel(self) -> None:
        """Stop generating; harmless when the request is finished.

        The slots are free at the next step; a waiting consumer learns at once that no more comes.
        """
        self._events.put(None)  # before the engine is notified, which may block
        if self._resume is not None:
            self._resume()
        self._cancel(self)

    def end(self) -> None:
        """Mark unfinished sequences as cancelled; the stepping thread calls it after `cancel`."""
        for sequence in self.sequences:
            sequence.cancelled = sequence.cancelled or sequence.finish_reason is None

    def generated(self, index: int) -> int:
        """Return how many tokens choice `index` has so far."""
        return sum(len(sequence.tokens) for sequence in self._answers(index))

    def said(self, index: int) -> str:
        """Return the text of choice `index` so far."""
        text = "".join(sequence.text.text for sequence in self._answers(index))
        return text if self._parts is None else self._parts().feed(text, False)[0]

    @property
    def first_at(self) -> float | None:
        """Time of the first token, on the monotonic clock."""
        return min((sequence.first_at for sequence in self.sequences if sequence.first_at), default=None)

    @property
    def done(self) -> bool:
        """True where every sequence has ended."""
        return all(sequence.done for sequence in self.sequences)

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over chunks of all choices as they come; raise Fault when the request failed. End early on `cancel`."""
        return (chunk for chunk in self._chunks(waits=True) if chunk is not None)

    def whole(self) -> Iterator[Chunk]:
        """Iterate over the last chunk of each choice, which holds the whole choice; the other chunks wake nobody."""
        self._in_pieces = False
        return (chunk for chunk in self if chunk.choice is not None)

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Iterate over chunks without waiting: None where there is none yet.

        The engine calls `resume`, which must not block, when there may be more.
        """
        self._resume = resume
        return self._chunks(waits=False)

    def _chunks(self, waits: bool) -> Iterator[Chunk | None]:
        finished: dict[tuple[int, bool], Sequence] = {}
        held: dict[int, Chunk] = {}
        while len(self._choices) < self._n:
            try:
                event = self._events.get(block=waits)
            except Empty:
                yield None
                continue
            if event is None:
                return
            sequence, text, logprobs, last = event  # the sequence may be ahead of its event
            if sequence.error is not None:
                self.cancel()
                raise sequence.error
            if sequence.cancelled and sequence.finish_reason is None:
                return
            index, baseline = self._roles[sequence]
            if last:
                finished[index, baseline] = sequence
            if not baseline and not last:
                chunk = self._chunk(index, text, logprobs)
                if chunk.text or chunk.logprobs or chunk.calls:
                    yield chunk
                continue
            if not baseline:
                held[index] = self._chunk(index, text, logprobs, last)
            if index in held and (not self._has_baseline or (index, True) in finished):
                chunk = held.pop(index)
                choice = self._finished(index, finished[index, False], finished.get((index, True)))
                self._choices[index] = choice
                yield replace(chunk, choice=choice)

    def result(self) -> Result:
        """Wait for the whole request; raise Fault when it failed or was cancelled."""
        for _ in self.whole():
            pass
        return Result.of(self._choices, self._n, self.prompt_tokens, self.sequences[0].reused)

    def _answers(self, index: int) -> list[Sequence]:
        """Return the sequence of choice `index`; none where there is no such choice."""
        return [sequence for sequence, role in self._roles.items() if role == (index, False)]

    def _chunk(self, index: int, text: str, logprobs: list[TokenLogprob], last: bool = False) -> Chunk:
        if not self._streams:
            return Chunk(index, text, tuple(logprobs))
        said, calls = self._streams[index].feed(text, last)
        return Chunk(index, said, tuple(logprobs), calls=calls)

    def _finished(self, index: int, sequence: Sequence, baseline: Sequence | None) -> Choice:
        sampling = sequence.spec.sampling
        text, calls, reason = sequence.text.text, [], sequence.finish_reason or ""
        if self._parts is not None:
            parts = self._parts()
            parts.feed(text, last=True)
            text, calls = parts.text, parts.calls
            if calls and reason == "stop" and not parts.cut:  # a stop string may have cut a call short
                reason = "tool_calls"
        return Choice(
            index=index,
            text=text,
            token_ids=tuple(sequence.tokens),
            finish_reason=reason,
            logprobs=None if sampling.logprobs is None else tuple(sequence.logprobs),
            applied=_applied(sequence),
            diagnostics=self._diagnostics(sequence, baseline),
            baseline=None if baseline is None else self._finished(index, baseline, None),
            measured=sequence.taken,
            tool_calls=tuple(calls),
            timing=Timing(sequence.queued_at, sequence.admitted_at, sequence.first_at, sequence.last_at),
        )

    def _diagnostics(self, sequence: Sequence, baseline: Sequence | None) -> dict[str, Any] | None:
        options = sequence.spec.diagnose
        if options is None:
            return None
        compared = None if baseline is None else baseline.taken
        layout, fed = sequence.prompt.layout, sequence.fed
        return envelope(
            FinishedAnswer(
                layout, options, sequence.tokens, fed, sequence.taken, self._around, compared, sequence.scores
            )
        )


def _applied(sequence: Sequence) -> dict[str, Any] | None:
    """Return what interventions did, and which pictures were scaled down; None where nothing was done."""
    pictures = [one.report() for one in sequence.prompt.shrunk]
    report = applied(sequence.spec.asked, sequence.taken) or {}
    return report | ({"pictures": pictures} if pictures else {}) or None
