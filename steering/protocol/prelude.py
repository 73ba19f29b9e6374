"""An intervention that depends on what the model says first: other requests run before the one that asks for it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace

from steering.model.mllm import MLLM
from steering.protocol.asked import Asked
from steering.protocol.request import Request, Result

Rounds = Generator[Iterable[Request], list[Result], Asked]
"""Requests that run together, then what they said, as often as need be; at last the intervention that follows from it."""


class Prelude(Asked):
    """Stands in a request for the intervention that its `rounds` end with. An engine takes no request that still has one:
    `steering.decide` runs it, and a server does."""

    @abstractmethod
    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        """Yield the requests of each round and return the intervention, which may have another kind and another place; its
        report tells of what was measured. Raises RequestError or Inapplicable where the request has no place for it, before
        anything runs. `request` is the one that asks; prompts are best rendered and kept as its own (`RENDERED_BY`,
        `cache_salt`)."""


def next_prelude(request: Request) -> Prelude | None:
    """Return the first prelude of a request that is not decided yet; None where there is none."""
    return next((one for one in request.asked.values() if isinstance(one, Prelude)), None)


def in_place_of(request: Request, prelude: Prelude, decided: Sequence[Asked] = ()) -> Request:
    """Return the request with other interventions where a prelude stood."""
    others = (decided if one is prelude else (one,) for one in request.asked.values())
    return replace(request, interventions=[one for some in others for one in some])
