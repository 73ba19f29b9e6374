"""One place in the queue serves a caller who asks several times, because a request depends on the one before it. Preludes,
whose requests do, run here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

from steering.engine.completion import Completion
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention import in_place_of, next_prelude
from steering.protocol.request import Request, Result

Begun = Callable[[Completion], object]
"""Is given what runs as it begins; see `Engine.generate`."""
Decided = TypeVar("Decided")


class Generates(Protocol):
    """Answers requests, as an engine does, or a turn of it."""

    mllm: MLLM

    def generate(self, requests: Iterable[Request], begun: Begun | None = None) -> list[Result]:
        """Answer requests in order."""


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


def run_rounds(
    engine: Generates, rounds: Generator[Iterable[Request], list[Result], Decided], begun: Begun | None = None
) -> Decided:
    """Answer the requests of each round, until the last; returns what follows from them. Raises what either raises."""
    try:
        requests = next(rounds)
        while True:
            results = engine.generate(requests, begun)
            requests = rounds.send(results)
    except StopIteration as end:
        decided: Decided = end.value
        return decided
    finally:
        rounds.close()


def decide_next(engine: Generates, request: Request, begun: Begun | None = None) -> Request:
    """Return the request with the intervention that its first prelude decides on; itself where it has none."""
    prelude = next_prelude(request)
    if prelude is None:
        return request
    decided = run_rounds(engine, prelude.rounds(engine.mllm, request), begun)
    return in_place_of(request, prelude, [decided])


def decide(engine: Generates, request: Request, begun: Begun | None = None) -> Request:
    """Return the request with the interventions that its preludes, such as `Auto`, decide on; what was measured stands in
    `applied`.

    Where others ask the engine too, give a `Turn` of it and submit the request there, or each step waits behind all who came
    meanwhile. `begun` is given everything that runs for it, so that it can be cancelled; raises Fault then.
    """
    while next_prelude(request) is not None:
        request = decide_next(engine, request, begun)
    return request
