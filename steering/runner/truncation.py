"""Truncate distributions by top_k, top_p and min_p, without sorting a vocabulary where less will do.

Sorting 150,000 logits takes a CPU ten milliseconds a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from steering.triton.truncation import thresholds_kernel

CANDIDATES = (256, 8192)
"""How many of a row's likeliest tokens a CPU tries, one after the other, before it sorts them all."""


class Truncation(NamedTuple):
    """The truncation of each row, (rows, 1): by number (int64), by mass, and by probability relative to the greatest."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def of(self, rows: torch.Tensor) -> Truncation:
        """Return the limits of some rows."""
        return Truncation(*(limit[rows] for limit in self))


def truncated(scaled: torch.Tensor, limits: Truncation) -> torch.Tensor:
    """Set the logits (rows, vocabulary) that each row's limits exclude to -inf.

    As in transformers, top_p counts the mass of the tokens that top_k keeps. Tokens of equal logits are kept together. On a
    GPU a kernel finds where rows end; without it, the vocabulary is sorted.
    """
    kernel = thresholds_kernel(scaled.device)
    if kernel is not None:
        least = kernel(scaled, *limits)
    else:
        vocabulary = scaled.shape[-1]
        # On a GPU the host would wait for the result of each try.
        tries = [size for size in CANDIDATES if size < vocabulary] if scaled.device.type == "cpu" else []
        least = _thresholds(scaled, limits, [*tries, vocabulary])
    return scaled.masked_fill(scaled < least, -torch.inf)


def _thresholds(scaled: torch.Tensor, limits: Truncation, tries: Sequence[int]) -> torch.Tensor:
    """Return the least logit that each row keeps, (rows, 1), from so many of its greatest ones.

    Rows that these do not settle are tried again with more.
    """
    size, *more = tries
    least, settled = _among(scaled.topk(size).values if more else scaled.sort(descending=True).values, scaled, limits)
    if more and not settled.all():
        rows = ~settled[:, 0]
        least[rows] = _thresholds(scaled[rows], limits.of(rows), more)
    return least


def _among(ordered: torch.Tensor, scaled: torch.Tensor, limits: Truncation) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least logit that each row keeps, and True where its greatest ones are enough to tell, (rows, 1) each.

    ordered: (rows, n), the greatest logits of each row in descending order.
    """
    top_k, top_p, min_p = limits
    size, vocabulary = ordered.shape[-1], scaled.shape[-1]
    counted, massed = (top_k > 0) & (top_k < vocabulary), top_p < 1
    greatest, last = ordered[:, :1], ordered[:, -1:]  # exponents are of differences to the first, which lose no digits
    by_number = torch.where(counted, ordered.gather(1, (top_k.clamp(max=size) - 1).clamp(min=0)), -torch.inf)
    masses = (ordered - greatest).exp().masked_fill(ordered < by_number, 0)
    every = (scaled - greatest).exp().sum(-1, keepdim=True)
    probabilities = masses / torch.where(counted, masses.sum(-1, keepdim=True), every)
    within = probabilities.cumsum(-1) - probabilities < top_p  # the mass before each token, which is 0 of the first
    by_mass = torch.where(massed, ordered.masked_fill(~within, torch.inf).amin(-1, keepdim=True), -torch.inf)
    by_greatest = greatest + min_p.log()  # of 0 it is -inf
    number_settled = ~counted | ((top_k <= size) & ~(massed & (last >= by_number)))  # later tokens may equal the last
    settled = number_settled & ~(massed & within[:, -1:])
    return torch.stack([by_number, by_mass, by_greatest]).amax(0), settled
