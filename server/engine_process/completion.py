"""Completions that another process generates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from server.engine_process.link import raised
from steering import Chunk, Result
from steering.protocol.request import Choice, TokenLogprob

PATIENCE = 2.0
"""Seconds to wait for an answer that takes no step."""


class RemoteCompletion:
    """A `ServedCompletion` that runs in the other process; `send` passes messages there, by name and number."""

    def __init__(self, send: Callable[..., None], number: int, n: int, group: str):
        self.prompt_tokens = self.max_tokens = 0
        self.first_at: float | None = None
        self.n, self.group = n, group
        self._send = send
        self._number = number
        self._events: SimpleQueue[Chunk | Exception | None] = SimpleQueue()
        self._resume: Callable[[], object] | None = None
        self._choices: dict[int, Choice] = {}
        self._left = n
        self._cached = 0
        self._said: list[list[Any]] = []
        self._given: dict[int, list[str]] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self.settled = threading.Event()
        self._cancelled = False

    # -- called by the receiving thread ------------------------------------------------------------------------------------

    def hear(self, name: str, *rest: Any) -> None:
        """Handle a message about this completion."""
        match name:
            case "began":
                (self.first_at,) = rest
                return
            case "text":
                self._tell(Chunk(*rest))
            case "chunk":
                chunk, self._cached = rest
                chunk = self._filled(chunk)
                self._left -= chunk.choice is not None
                if not self._left:
                    self.settled.set()
                self._tell(chunk)
            case "gone":
                self.first_at, self._said = rest
                self._end(None)
            case "failed":
                self._end(raised(rest[0]))

    def _filled(self, chunk: Chunk) -> Chunk:
        """Return the chunk whose choice holds the log-probabilities that came with its earlier chunks."""
        told = self._logprobs.setdefault(chunk.index, [])
        told += chunk.logprobs
        if chunk.choice is None or chunk.choice.logprobs != ():
            return chunk
        return replace(chunk, choice=replace(chunk.choice, logprobs=tuple(told)))

    def fail(self, error: Exception) -> None:
        """End the completion with an error."""
        self._end(error)

    def _end(self, last: Exception | None) -> None:
        self.settled.set()
        self._tell(last)

    def _tell(self, event: Chunk | Exception | None) -> None:
        self._events.put(event)
        if self._resume is not None:
            self._resume()

    # -- called by the consumer --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for chunk in self._chunks(waits=True) if chunk is not None)

    def whole(self) -> Iterator[Chunk]:
        """Yield the last chunk of each choice; the other process sends no others from now on."""
        self._send("whole", self._number)
        return (chunk for chunk in self if chunk.choice is not None)

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Yield chunks, and None where there is none yet."""
        self._resume = resume
        return self._chunks(waits=False)

    def _chunks(self, waits: bool) -> Iterator[Chunk | None]:
        while len(self._choices) < self.n:
            try:
                event = self._events.get(block=waits)
            except Empty:
                yield None
                continue
            if event is None:
                return
            if isinstance(event, Exception):
                raise event
            if event.choice is not None:
                self._choices[event.index] = event.choice
            else:
                self._given.setdefault(event.index, []).append(event.text)
            yield event

    def result(self) -> Result:
        """Wait for the whole result."""
        for _ in self._chunks(waits=True):
            pass
        return Result.of(self._choices, self.n, self.prompt_tokens, self._cached)

    def generated(self, index: int) -> int:
        """Return the number of tokens of a choice.

        A finished choice counts all. A cancelled one counts those at its cancellation or, if the other process cannot tell
        any more, its received chunks, nearly all of which hold one token.
        """
        choice = self._choices.get(index)
        return len(choice.token_ids) if choice is not None else int(self._so_far(index)[0])

    def said(self, index: int) -> str:
        """Return the text of a choice, as far as `generated` counts it."""
        choice = self._choices.get(index)
        return choice.text if choice is not None else str(self._so_far(index)[1])

    def _so_far(self, index: int) -> list[Any]:
        if self._cancelled:
            self.settled.wait(PATIENCE)
        if self._said:
            return self._said[index]
        given = self._given.get(index, [])
        return [len(given), "".join(given)]

    def cancel(self) -> None:
        """Stop generating; harmless once finished."""
        if not self.settled.is_set():
            self._cancelled = True
            self._tell(None)
            self._send("cancel", self._number, self.n)
