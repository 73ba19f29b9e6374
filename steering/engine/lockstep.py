"""Lockstep: engines of several processes run one model together, and each takes the steps that the first one decides.

An engine's actions depend only on its requests and on the step before which each arrives. So the first rank sends the
others, before each step, what is new: whole requests (`relay`), and cancellations. No other code knows of ranks, except that
means over heads are computed, and tokens chosen, together (`decoder.ranks`).
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
"""Time that a rank waits for the next step, which is as long as the server is idle."""
NOTHING = Allowance()
TOGETHER = timedelta(seconds=60)
"""Time that a rank whose step failed waits for the others, which must fail too."""


class Joining(NamedTuple):
    """A request in the queue: its bytes, as `relay` writes them, and its number from now on."""

    number: int
    written: bytes
    waited: bool
    group: str


class News(NamedTuple):
    """The events between two steps, in this order: `asked`, `cancelled`, `ended`.

    asked: new requests. cancelled: numbers of requests. ended: all sequences end, because the engine stops. over: there is
    no further step.
    """

    asked: tuple[Joining, ...] = ()
    cancelled: tuple[int, ...] = ()
    ended: bool = False
    over: bool = False


class Lockstep:
    """The messages from the first rank to the others, while their engines live.

    `known` holds the requests that have joined, by number, until they have left.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.known: dict[int, Completion] = {}
        self._incoming: dict[int, tuple[Completion, Joining]] = {}
        self._cancelled: list[int] = []
        self._ended = False
        self._count = 0
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._failures = dist.new_group(backend="gloo", timeout=TOGETHER)

    # -- for the first rank --------------------------------------------------------------------------------------------

    @property
    def incoming(self) -> list[Sequence]:
        """The sequences that join at the next step."""
        return [sequence for completion, _ in list(self._incoming.values()) for sequence in completion.sequences]

    def submit(self, completion: Completion, written: bytes, waited: bool, group: str) -> None:
        """Let a request join at the next step."""
        self._count += 1
        self._incoming[self._count] = completion, Joining(self._count, written, waited, group)

    def cancel(self, completion: Completion) -> None:
        """Let a request end at the next step."""
        places = [*self.known.items(), *((number, one) for number, (one, _) in self._incoming.items())]
        self._cancelled += [number for number, one in places if one is completion]

    def end(self) -> None:
        """Let all sequences end at the next step."""
        self._ended = True

    def taken(self) -> tuple[News, dict[int, Completion]]:
        """Return the news since the last step, and the requests in it."""
        news = News(tuple(asked for _, asked in self._incoming.values()), tuple(self._cancelled), self._ended)
        joined = {number: completion for number, (completion, _) in self._incoming.items()}
        self._incoming, self._cancelled, self._ended = {}, [], False
        return news, joined

    def tell(self, news: News, alive: Iterable[Sequence], allowance: Allowance = NOTHING) -> None:
        """Begin the next step of all ranks.

        alive: the sequences before the news. allowance: the limits of the step.
        """
        data = b"" if news == News() else relay.written(news)
        head = torch.tensor([len(data), _stand(alive), *allowance], dtype=torch.float64)
        dist.broadcast(head, 0, group=self._group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    # -- for the other ranks -------------------------------------------------------------------------------------------

    def hear(self, alive: Iterable[Sequence]) -> tuple[News, Allowance]:
        """Wait for the next step; return its news and its limits.

        Raises RuntimeError where this rank's sequences differ from the first rank's.
        """
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

    # -- for all ranks -------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Continue after a step that raised on all ranks; raise its error where others did not fail, which would hang."""
        try:
            dist.barrier(group=self._failures)
        except RuntimeError:
            raise error from None


def _stand(alive: Iterable[Sequence]) -> int:
    """Return a checksum of the state of every sequence."""
    return zlib.crc32(repr([(one.slot, one.computed, len(one.tokens)) for one in alive]).encode())
