"""Preludes are run: requests whose answers decide what an intervention is."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from steering.engine.completion import Completion
from steering.engine.engine import Engine
from steering.engine.turn import Turn
from steering.protocol.intervention import in_place_of, next_prelude
from steering.protocol.request import Request, Result

Begun = Callable[[Completion], object]
"""Is given what runs as it begins; see `Engine.generate`."""
Decided = TypeVar("Decided")


def run_rounds(
    engine: Engine | Turn, rounds: Generator[Iterable[Request], list[Result], Decided], begun: Begun | None = None
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


def decide_next(engine: Engine | Turn, request: Request, begun: Begun | None = None) -> Request:
    """Return the request with the intervention that its first prelude decides on; itself where it has none."""
    prelude = next_prelude(request)
    if prelude is None:
        return request
    decided = run_rounds(engine, prelude.rounds(engine.mllm, request), begun)
    return in_place_of(request, prelude, [decided])


def decide(engine: Engine | Turn, request: Request, begun: Begun | None = None) -> Request:
    """Return the request with the interventions that its preludes, such as `Auto`, decide on; what was measured stands in
    `applied`.

    Where others ask the engine too, give a `Turn` of it and submit the request there, or each step waits behind all who came
    meanwhile. `begun` is given everything that runs for it, so that it can be cancelled; raises Fault then.
    """
    while next_prelude(request) is not None:
        request = decide_next(engine, request, begun)
    return request
