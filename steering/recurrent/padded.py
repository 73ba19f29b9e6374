"""A pass of one prompt whose number of tokens lies on the device, so that a CUDA graph serves all that are not longer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from steering.recurrent.states import GRAIN, RecurrentPass


def divided_at(start: int, length: int) -> int:
    """Return how many of a pass's tokens are before its last multiple of `GRAIN` tokens of the prompt."""
    return max(0, (start + length - 1) // GRAIN * GRAIN - start)


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
        def divided() -> torch.Tensor:
            last = (self.starts + self.length - 1).div(GRAIN, rounding_mode="floor") * GRAIN
            return (last - self.starts).clamp(min=0)

        return self._on("divided", device, divided)

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
            at = self._divided_on(inputs.device)[:, None] + torch.arange(width, device=inputs.device)
            before = inputs.gather(2, at[:, None].expand(-1, inputs.shape[1], -1))
            self.states.leave(layer, (before, *others))
