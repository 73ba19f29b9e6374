"""A pass of one prompt whose number of tokens lies on the device, so that a CUDA graph serves all that are not longer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import torch

from steering.recurrent.states import GRAIN, RecurrentPass, inputs_before

_Number = TypeVar("_Number", int, torch.Tensor)


def divided_at(start: _Number, length: _Number) -> _Number:
    """Return how many of a pass's tokens are before its last multiple of `GRAIN` tokens of the prompt; 0 without one."""
    last = (start + length - 1) // GRAIN * GRAIN
    return (last - start) * (last > start)


@dataclass
class PaddedPass(RecurrentPass):
    """A pass of one row of `tokens` tokens, of which `length` (1,) are real.

    It leaves the states behind `divided_at` in the row of the states that nothing reads.
    """

    tokens: int = field(kw_only=True)
    length: torch.Tensor = field(kw_only=True)

    @property
    def undivided(self) -> bool:
        return False

    def real_on(self, device: torch.device) -> torch.Tensor:
        return self._on("real", device, lambda: self.length)

    def _divided_on(self, device: torch.device) -> torch.Tensor:
        return self._on("divided", device, lambda: divided_at(self.starts, self.length))

    def parts_on(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if device not in self._parts:
            divided, real = self._divided_on(device)[:, None], self.real_on(device)[:, None]
            every = torch.arange(self.tokens, device=device)[None]
            rest = divided + every[:, :GRAIN]
            self._parts[device] = [(every, every < divided), (rest, rest < real)]
        return self._parts[device]

    @property
    def cuts(self) -> int:
        return 1

    def take(self, layer: int, part: int, inputs: torch.Tensor, width: int, *others: torch.Tensor) -> None:
        if part == 0:
            before = inputs_before(inputs, self._divided_on(inputs.device), width)
            self.states.leave(layer, (before, *others))
