"""The processes that run one model together, each with its share of every layer's heads and neurons."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """A process among `size`, numbered from 0; by default the only one, whose methods do nothing.

    All of them call the same methods in the same order, with tensors of the same shapes.
    """

    rank: int = 0
    size: int = 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' values."""
        if self.size == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over all heads from each rank's mean over its own; ranks have equally many heads."""
        return values if self.size == 1 else self.sum(values) / self.size

    def joined(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values (..., n) of all ranks in order: (..., size * n)."""
        if self.size == 1:
            return values
        values = values.contiguous()
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return torch.cat(parts, -1)

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """Return the first rank's values, so that all ranks agree where rounding decides."""
        if self.size == 1:
            return values
        shared = values.to(torch.int64, copy=True).contiguous()
        dist.broadcast(shared, 0)
        return shared.to(values.dtype)


ALONE = Ranks()
