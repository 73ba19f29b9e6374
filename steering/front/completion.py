"""The caller's handle on a running request: the stream of chunks, the result, and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue

from steering.front.output_processor import OutputProcessor
from steering.messages.messages import Output
from steering.protocol.request import Chunk, Result

PATIENCE = 2.0
"""Seconds for which a caller waits for the last tokens of an answer that it has cancelled."""


class Completion:
    """The answers of one request, as `Engine.submit` returns them.

    Iterate it for chunks as they come, or call `result()`. Both wait for the stepping thread, and raise Fault when the
    request failed. It has one consumer, in whose thread tokens become text. `abort` and `whole` tell the core to end the
    answers, or to put out each as a whole; `stepped` returns True where another thread steps.
    """

    def __init__(
        self,
        processor: OutputProcessor,
        abort: Callable[[], object],
        whole: Callable[[], object],
        stepped: Callable[[], bool],
        answers: int,
        group: str = "",
    ):
        self.prompt_tokens, self.max_tokens = processor.prompt_tokens, processor.max_tokens
        self.prompt_end = processor.prompt_end
        self.answers, self.group = answers, group
        self.first_at: float | None = None
        """Time of the first token, on the monotonic clock."""
        self._processor = processor
        self._abort, self._put_out_whole, self._stepped = abort, whole, stepped
        self._outputs: SimpleQueue[Output | BaseException | None] = SimpleQueue()
        self._resume: Callable[[], object] | None = None
        self._running = answers
        self._ended = threading.Event()
        self._cancelled = False
        self._over = False  # no further chunk comes

    # -- for the client that receives outputs --------------------------------------------------------------------------

    def receive(self, output: Output) -> None:
        """Queue an output of the core for the consumer."""
        if output.first_at:
            self.first_at = min(self.first_at or output.first_at, output.first_at)
        self._running = max(0, self._running - (output.ended is not None))  # 0 where `fail` was first
        self._tell(output)
        if not self._running:
            self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End all answers with an error, where no more outputs come."""
        self._running = 0
        self._tell(error)
        self._ended.set()

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache; known with the first chunk."""
        return self._processor.cached_tokens

    @property
    def done(self) -> bool:
        """True where every answer has ended."""
        return not self._running

    def _tell(self, output: Output | BaseException | None) -> None:
        self._outputs.put(output)
        if self._resume is not None:
            self._resume()

    # -- for the consumer ----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        """Iterate over chunks of all choices as they come; raise Fault when the request failed. End early on `cancel`."""
        return (chunk for chunk in self._chunks(waits=True) if chunk is not None)

    def whole(self) -> Iterator[Chunk]:
        """Iterate over the last chunk of each choice, which holds the whole choice; others do not wake the consumer."""
        self._put_out_whole()
        return (chunk for chunk in self if chunk.choice is not None)

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Iterate over chunks without waiting: None where there is none yet.

        `resume`, which must not block, is called when there may be more.
        """
        self._resume = resume
        return self._chunks(waits=False)

    def result(self) -> Result:
        """Wait for the whole request; raise Fault when it failed or was cancelled."""
        for _ in self._chunks(waits=True):
            pass
        answers = self._processor
        return Result.of(answers.choices, answers.n, self.prompt_tokens, answers.cached_tokens)

    def generated(self, index: int) -> int:
        """Return how many tokens choice `index` has so far."""
        self._read_rest()
        return self._processor.generated(index)

    def text_of(self, index: int) -> str:
        """Return the text of choice `index` so far."""
        self._read_rest()
        return self._processor.text(index)

    def cancel(self) -> None:
        """Stop generating; harmless when the request is finished.

        The slots are free at the next step; iteration over chunks ends at once.
        """
        if self._running:
            self._cancelled = True
            self._tell(None)  # before the core is told, which may block
            self._abort()

    def _chunks(self, waits: bool) -> Iterator[Chunk | None]:
        while len(self._processor.choices) < self._processor.n and not self._over:
            try:
                output = self._outputs.get(block=waits)
            except Empty:
                yield None
                continue
            if output is None:
                self._over = True
                return
            try:
                chunk = self._read(output)
            except BaseException:
                self.cancel()
                raise
            if isinstance(output, Output) and output.aborted:
                return
            if chunk is not None:
                yield chunk

    def _read(self, output: Output | BaseException) -> Chunk | None:
        if isinstance(output, BaseException):
            raise output
        return self._processor.feed(output)

    def _read_rest(self) -> None:
        """Process outputs that came after the consumer stopped; for a cancelled request, wait for its last token."""
        if self._cancelled and self._stepped():
            self._ended.wait(PATIENCE)
        self._over = self._over or self._cancelled
        while self._cancelled or not self._running:
            try:
                output = self._outputs.get_nowait()
            except Empty:
                return
            if isinstance(output, Output):
                with suppress(Exception):  # the consumer wants no errors any more
                    self._processor.feed(output)
