"""Engines of several processes that run one model together: each takes the same steps, as the first one decides.

What an engine does follows from what it was asked, and before which of its steps. So the first rank tells the others before
each step what is new: requests as a whole (`relay`), and which were cancelled. Nothing else knows of them, but that means
over heads are made, and tokens chosen, together (`decoder.ranks`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from steering.decoder.ranks import Ranks
from steering.engine.budget import Allowance
from steering.engine.completion import Completion
from steering.protocol.sequence import Sequence
from steering.relay import relay

PATIENCE = timedelta(days=3650)
"""How long a rank waits to hear of the next step, which is as long as nobody asks anything."""
NOTHING = Allowance()
TOGETHER = timedelta(seconds=60)
"""How long one rank's failed step may be ahead of the others', who must fail too."""


class Joining(NamedTuple):
    """A request in the queue. written: as `relay` writes it; number: what it is called from now on."""

    number: int
    written: bytes
    waited: bool
    group: str


class News(NamedTuple):
    """What happened between two steps, in this order: requests, numbers of those that were cancelled, whether all that there
    are end because the engine stops. over: that there is no further step."""

    asked: tuple[Joining, ...] = ()
    cancelled: tuple[int, ...] = ()
    ended: bool = False
    over: bool = False


class Lockstep:
    """What the first rank tells the others, as long as the engines last that are made of it. `known` are the requests that
    have joined, by number, until they have left."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.known: dict[int, Completion] = {}
        self._incoming: dict[int, tuple[Completion, Joining]] = {}
        self._cancelled: list[int] = []
        self._ended = False
        self._count = 0
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._failures = dist.new_group(backend="gloo", timeout=TOGETHER)

    # -- of the first rank ---------------------------------------------------------------------------------------------

    @property
    def incoming(self) -> list[Sequence]:
        """The sequences that join at the next step."""
        return [sequence for completion, _ in list(self._incoming.values()) for sequence in completion.sequences]

    def submit(self, completion: Completion, written: bytes, waited: bool, group: str) -> None:
        """Have a request join at the next step."""
        self._count += 1
        self._incoming[self._count] = completion, Joining(self._count, written, waited, group)

    def cancel(self, completion: Completion) -> None:
        """Have it end at the next step."""
        places = [*self.known.items(), *((number, one) for number, (one, _) in self._incoming.items())]
        self._cancelled += [number for number, one in places if one is completion]

    def end(self) -> None:
        """Have all that there are end at the next step."""
        self._ended = True

    def taken(self) -> tuple[News, dict[int, Completion]]:
        """What is new since the last step, and the requests in it."""
        news = News(tuple(asked for _, asked in self._incoming.values()), tuple(self._cancelled), self._ended)
        joined = {number: completion for number, (completion, _) in self._incoming.items()}
        self._incoming, self._cancelled, self._ended = {}, [], False
        return news, joined

    def tell(self, news: News, alive: Iterable[Sequence], allowance: Allowance = NOTHING) -> None:
        """Begin the next step of all ranks. alive: what it is at, before the news. allowance: what it may take in."""
        data = b"" if news == News() else relay.written(news)
        head = torch.tensor([len(data), _stand(alive), *allowance], dtype=torch.float64)
        dist.broadcast(head, 0, group=self._group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    # -- of the others -------------------------------------------------------------------------------------------------

    def hear(self, alive: Iterable[Sequence]) -> tuple[News, Allowance]:
        """Wait for the next step: what is new, and what it may take in. Raises RuntimeError where it is no longer
        the one that the first rank takes."""
        head = torch.zeros(2 + len(NOTHING), dtype=torch.float64)
        dist.broadcast(head, 0, group=self._group)
        size, stand, *numbers = head.tolist()
        allowance = Allowance(*numbers)
        if stand != _stand(alive):
            raise RuntimeError(f"Rank {self.ranks.rank} is no longer where the first one is.")
        if not size:
            return News(), allowance
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        asked, *others = relay.read(data.numpy().tobytes())
        return News(tuple(Joining(*one) for one in asked), *others), allowance

    # -- of all --------------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Go on after a step that raised, where it raised on all ranks; raises it again where it did not, because the others
        wait for what will not come."""
        try:
            dist.barrier(group=self._failures)
        except RuntimeError:
            raise error from None


def _stand(alive: Iterable[Sequence]) -> int:
    """A checksum of where every sequence is."""
    return zlib.crc32(repr([(one.slot, one.computed, len(one.tokens)) for one in alive]).encode())
