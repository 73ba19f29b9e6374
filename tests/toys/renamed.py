"""A second toy intervention: the nudge with a value for every option, one of which has another name on the wire."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from steering import Options
from steering.protocol.sequence import Sequence
from tests.toys.nudge import NudgeSlots


class Renamed(Options):
    """Adds `amount` to the logit of one token, which a request calls `id`."""

    path = ("nudge",)

    amount: float = Field(100.0, gt=0, le=1000)
    token: int = Field(5, ge=0, alias="id")

    def report(self, measured: Any) -> dict[str, Any]:
        return self.settings()


class RenamedSlots(NudgeSlots):
    def place(self, sequence: Sequence) -> None:
        nudge = sequence.spec.asked.get(self.name)
        token, by = (nudge.token, nudge.amount) if isinstance(nudge, Renamed) else (0, 0.0)
        self.token[sequence.slot], self.by[sequence.slot] = token, by
