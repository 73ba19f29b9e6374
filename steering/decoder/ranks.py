"""The processes that run one model together, each with its share of every layer's heads and neurons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes, numbered from 0; the only one by default, where nothing here does anything.

    All of them call the same methods in the same order, with tensors of the same shapes.
    """

    rank: int = 0
    size: int = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of what each of them has."""
        if self.size == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """The mean over all heads, of which each of them has taken the mean over its own; they have equally many."""
        return values if self.size == 1 else self.sum(values) / self.size

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """(..., n) of all: (..., size * n), in their order."""
        if self.size == 1:
            return values
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return torch.cat(parts, -1)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """What the first of them has: of what a rounding decides, there must be one."""
        if self.size == 1:
            return values
        one = values.to(torch.int64, copy=True).contiguous()
        dist.broadcast(one, 0)
        return one.to(values.dtype)


ALONE = Ranks()
