"""Turns: one place in the queue for several requests, each of which depends on the one before, such as preludes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

from steering.front.completion import Completion
from steering.model.mllm import MLLM
from steering.protocol.intervention import in_place_of, next_prelude
from steering.protocol.request import Request
from steering.protocol.result import Result

Begun = Callable[[Completion], object]
"""A callback that gets each completion as it begins; see `Engine.generate`."""
Decided = TypeVar("Decided")


class Generates(Protocol):
    """Answers requests, as an engine or a turn of it does."""

    mllm: MLLM

    def generate(self, requests: Iterable[Request], begun: Begun | None = None) -> list[Result]:
        """Answer requests in order."""


class Queue(Protocol):
    """The part of a client that a turn uses."""

    mllm: MLLM

    def submit(self, request: Request, turn: Turn | None = None) -> Completion:
        """Queue a request in the place of a turn."""

    def check(self, turn: Turn) -> None:
        """Raise Busy where a turn's next request would be refused, whatever it is."""

    def result_of(self, completion: Completion) -> Result:
        """Return the result of a completion, once it is ready."""

    def count(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt."""


class Turn:
    """A place in the queue for several requests, made by `Engine.turn`; groups of turns are scheduled fairly.

    The first requests wait behind earlier ones, or are refused, as any request. Once they are answered, later ones go before
    requests that came after the turn. From the first accepted request to its end a turn counts as one running request, so
    that its requests are answered even while the engine drains.
    """

    def __init__(self, engine: Queue, group: str = ""):
        self.mllm = engine.mllm
        self.group = group
        self.served = False
        """True once a request was answered, so that the next ones need not wait again."""
        self._engine = engine

    def check(self) -> None:
        """Raise Busy where another answer may not join now, before anything is prepared; Fault when the engine is closed."""
        self._engine.check(self)

    def submit(self, request: Request) -> Completion:
        """Submit a request in this turn, as `Engine.submit`."""
        return self._engine.submit(request, self)

    def count(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt, as `Engine.count`."""
        return self._engine.count(request)

    def decide(self, request: Request, begun: Begun) -> Request:
        """Return the request with the intervention that its first prelude decides on, as `decide_next`."""
        return decide_next(self, request, begun)

    def generate(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> list[Result]:
        """Answer a few requests in this turn, queued together, as `Engine.generate`; raise Busy as `submit` does."""
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
    """Answer the requests of each round, until the last; return the decision. Raises whatever both raise."""
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
    """Return the request with the interventions that its preludes, such as `Auto`, decide on.

    `applied` holds the measurements. Where others use the engine too, pass a `Turn` of it and submit the request there;
    otherwise each round waits behind all requests that came meanwhile. `begun` receives each completion that runs for it;
    where one is cancelled, this raises Fault.
    """
    while next_prelude(request) is not None:
        request = decide_next(engine, request, begun)
    return request
