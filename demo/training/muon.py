"""Muon: momentum whose update is orthogonalised by Newton-Schulz iterations (Keller Jordan, 2024), for matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return nearly orthogonal rows for matrices (n, rows, columns) with rows <= columns.

    The quintic iteration x <- (a + b g + c g g) x with g = x x^T runs on g alone, which is the smaller matrix; the product
    of its factors is applied once at the end.
    """
    a, b, c = COEFFICIENTS
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    gram = x @ x.mT
    identity = torch.eye(x.shape[1], device=x.device)
    product = None
    for i in range(iterations):
        factor = a * identity + b * gram + c * (gram @ gram)
        product = factor if product is None else factor @ product
        if i + 1 < iterations:
            gram = factor @ gram @ factor
    return product @ x if product is not None else x


class Muon:
    """Muon with a single learning rate for matrices of any shape: the update of each has RMS 0.2.

    With several data-parallel ranks each orthogonalises its share of the matrices and they exchange the results.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        momentum: float = 0.95,
        decay: float = 0.02,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.parameters = list(parameters)
        self.momentum, self.decay = momentum, decay
        self.rank, self.ranks = rank, ranks
        self.buffers = [torch.zeros_like(p) for p in self.parameters]
        self.by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, parameter in enumerate(self.parameters):
            rows, columns = sorted(parameter.shape)
            self.by_shape[rows, columns].append(i)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the matrices from the gradients, which are the same on every rank."""
        for (rows, columns), indices in self.by_shape.items():
            share = -(-len(indices) // self.ranks)
            own_updates = []
            for place, i in enumerate(indices):
                gradient = self.parameters[i].grad
                assert gradient is not None
                self.buffers[i].mul_(self.momentum).add_(gradient)
                if place // share == self.rank:
                    update = gradient + self.momentum * self.buffers[i]
                    own_updates.append(update if update.shape[0] == rows else update.T)
            updates = orthogonalise(torch.stack(own_updates)) if own_updates else torch.empty(0, rows, columns)
            if self.ranks > 1:
                padded = updates.new_zeros(share, rows, columns)
                padded[: len(updates)] = updates
                everyone = [torch.empty_like(padded) for _ in range(self.ranks)]
                dist.all_gather(everyone, padded)
                updates = torch.cat(everyone)
            for i, wide in zip(indices, updates, strict=False):
                parameter = self.parameters[i]
                parameter.mul_(1 - rate * self.decay)
                parameter.add_(wide if parameter.shape[0] == rows else wide.T, alpha=-rate * 0.2 * columns**0.5)

    def state_dict(self) -> list[Tensor]:
        return self.buffers

    def load_state_dict(self, buffers: list[Tensor]) -> None:
        for buffer, saved in zip(self.buffers, buffers, strict=True):
            buffer.copy_(saved)
