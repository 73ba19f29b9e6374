"""One place in the queue for a caller who asks several times, because a request depends on what the one before it said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from steering.engine.completion import Completion
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.request import Request, Result


class Queue(Protocol):
    """What takes the requests of a turn."""

    mllm: MLLM

    def submit(self, request: Request, turn: Turn | None = None, prompt: Prompt | None = None) -> Completion:
        """Queue a request in the place of a turn."""

    def check(self, turn: Turn) -> None:
        """Raise Busy where a turn's next request would be refused, whatever it is."""

    def result_of(self, completion: Completion) -> Result:
        """Give its result, once it is there."""


class Turn:
    """One place in the queue for several requests, made by `Engine.turn`. What it asks first waits behind whoever
    came before, or is refused, as any request; what it asks once that is answered goes before those who came later,
    and is taken while the engine drains."""

    def __init__(self, engine: Queue, group: str = ""):
        self.mllm = engine.mllm
        self.group = group
        self.served = False
        """Whether it was answered, so that what it asks now has waited already."""
        self._engine = engine

    def check(self) -> None:
        """Raise Busy where no answer more may join now, before anything is prepared; Fault when the engine is closed."""
        self._engine.check(self)

    def submit(self, request: Request, prompt: Prompt | None = None) -> Completion:
        """As `Engine.submit`, in this turn."""
        return self._engine.submit(request, self, prompt)

    def generate(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> list[Result]:
        """As `Engine.generate`, in this turn, of few requests, which are queued together; raises Busy as `submit` does."""
        pending: list[Completion] = []
        try:
            for request in requests:
                pending.append(self.submit(request))
                if begun is not None:
                    begun(pending[-1])
            results = [self._engine.result_of(completion) for completion in pending]
            self.served = True
            return results
        finally:
            for completion in pending:
                completion.cancel()
