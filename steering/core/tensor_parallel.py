"""Tensor parallelism: the cores of several processes run one model together, in steps that the first one decides.

A core's actions depend only on its requests and on the step before which each arrives. So the first rank sends the others,
before each step, the messages that it received: requests and aborts. No other code knows of ranks, except that means over
heads are computed, and tokens chosen, together (`decoder.ranks`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from steering.core.budget import Allowance
from steering.decoder.ranks import Ranks
from steering.messages import serialization
from steering.messages.messages import Add
from steering.protocol.sequence import Sequence

PATIENCE = timedelta(days=3650)
"""Time that a rank waits for the next step, which is as long as the server is idle."""
NOTHING = Allowance()
TOGETHER = timedelta(seconds=60)
"""Time that a rank whose step failed waits for the others, which must fail too."""


class StepEvents(NamedTuple):
    """The events between two steps, in this order: `added`, `cancelled`, `ended`.

    added: new requests. cancelled: numbers of requests. ended: all sequences end, because the engine stops. over: there is
    no further step.
    """

    added: tuple[Add, ...] = ()
    cancelled: tuple[int, ...] = ()
    ended: bool = False
    over: bool = False


class RankMessages:
    """The messages from the first rank to the others, while their cores live."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._incoming: list[tuple[list[Sequence], Add]] = []
        self._cancelled: list[int] = []
        self._ended = False
        self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._failures = dist.new_group(backend="gloo", timeout=TOGETHER)

    # -- for the first rank --------------------------------------------------------------------------------------------

    @property
    def incoming(self) -> list[Sequence]:
        """The sequences that join at the next step."""
        return [sequence for sequences, _ in list(self._incoming) for sequence in sequences]

    def submit(self, sequences: list[Sequence], request: Add) -> None:
        """Let a request join at the next step."""
        self._incoming.append((sequences, request))

    def cancel(self, number: int) -> None:
        """Let a request end at the next step."""
        self._cancelled.append(number)

    def end(self) -> None:
        """Let all sequences end at the next step."""
        self._ended = True

    def drain(self) -> tuple[StepEvents, list[list[Sequence]]]:
        """Return the events since the last step, and the sequences of each request in it."""
        events = StepEvents(tuple(request for _, request in self._incoming), tuple(self._cancelled), self._ended)
        joined = [sequences for sequences, _ in self._incoming]
        self._incoming, self._cancelled, self._ended = [], [], False
        return events, joined

    def broadcast(self, events: StepEvents, alive: Iterable[Sequence], allowance: Allowance = NOTHING) -> None:
        """Begin the next step of all ranks.

        alive: the sequences before the events. allowance: the limits of the step.
        """
        data = b"" if events == StepEvents() else serialization.written([*events])
        head = torch.tensor([len(data), _stand(alive), *allowance], dtype=torch.float64)
        dist.broadcast(head, 0, group=self._group)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._group)

    # -- for the other ranks -------------------------------------------------------------------------------------------

    def receive(self, alive: Iterable[Sequence]) -> tuple[StepEvents, Allowance]:
        """Wait for the next step; return its events and its limits.

        Raises RuntimeError where this rank's sequences differ from the first rank's.
        """
        head = torch.zeros(2 + len(NOTHING), dtype=torch.float64)
        dist.broadcast(head, 0, group=self._group)
        size, stand, *numbers = head.tolist()
        allowance = Allowance(*numbers)
        if stand != _stand(alive):
            raise RuntimeError(f"Rank {self.ranks.rank} is no longer where the first one is.")
        if not size:
            return StepEvents(), allowance
        data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return StepEvents(*serialization.read(data.numpy().tobytes())), allowance

    # -- for all ranks -------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> None:
        """Continue after a step that raised on all ranks; raise its error where others did not fail, which would hang."""
        try:
            dist.barrier(group=self._failures)
        except RuntimeError:
            raise error from None


def _stand(alive: Iterable[Sequence]) -> int:
    """Return a checksum of the state of every sequence."""
    return zlib.crc32(repr([(sequence.slot, sequence.computed, len(sequence.tokens)) for sequence in alive]).encode())
