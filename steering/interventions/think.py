"""SAGE's second stage, Think: FFN updates that override those of attention are damped (SAGE paper, section 5.1, eq. 5).

Per layer and token D = KL(softmax(delta_mha) || softmax(delta_ffn)) over the d components of the two updates of the
residual stream; where D exceeds the layer's threshold, the layer's output is h_mid + gamma * delta_ffn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steering.errors import RequestError


@dataclass(frozen=True)
class Think:
    """`gamma` scales the damped updates. D (nats) is compared with `threshold` in every layer or, where that is None, with
    the layer's `quantile` of D as the model's calibration measured it."""

    gamma: float = 0.9
    quantile: float = 0.9
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name, value, low, high in (("gamma", self.gamma, 0.0, 1.0), ("quantile", self.quantile, 0.0, 1.0)):
            if not low <= value <= high:
                raise RequestError(
                    f"'sage.think.{name}' must be from {low:g} to {high:g}; got {value}.", param=f"sage.think.{name}"
                )
        if self.threshold is not None and not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise RequestError(
                f"'sage.think.threshold' must be a finite number of at least 0; got {self.threshold}.",
                param="sage.think.threshold",
            )


def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """D in nats, (...), of the updates of a layer, (..., d)."""
    p, q = mha.float().log_softmax(-1), ffn.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


class ThinkRows:
    """The damping of one forward pass, and what it did.

    gamma: (rows,). threshold: (layers, rows), infinite for rows that do not think. real: (rows, n), 0 on padding.
    """

    def __init__(self, gamma: torch.Tensor, threshold: torch.Tensor, real: torch.Tensor):
        self._threshold = threshold[:, :, None].unbind()
        self.real = real
        self._less = gamma[:, None] - 1
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def damp(self, layer: int, hidden: torch.Tensor, mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
        """The layer's output after damping. hidden (rows, n, d): the output; mha, ffn: its two updates."""
        differs = divergence(mha, ffn)  # (rows, n)
        damped = differs > self._threshold[layer]
        self._layers.append((damped, differs))
        return torch.addcmul(hidden, (self._less * damped)[..., None].to(hidden.dtype), ffn)

    def divergences(self) -> torch.Tensor:
        """D of every token: (layers, rows, n)."""
        return torch.stack([differs for _, differs in self._layers])

    def measured(self) -> torch.Tensor:
        """(rows, layers, 2): the number of damped updates and the sum of D over the real tokens."""
        damped = torch.stack([damped for damped, _ in self._layers])
        return (torch.stack([damped.float(), self.divergences()], -1) * self.real[..., None]).sum(2).transpose(0, 1)


def report(measured: torch.Tensor, tokens: int) -> dict[str, Sequence[float]]:
    """Per layer the share of damped updates and the mean of D. measured: (layers, 2), summed over `tokens`."""
    damped, differs = (measured / max(tokens, 1)).unbind(-1)
    return {"suppressed": damped.tolist(), "divergence": differs.tolist()}


class ThinkSlots:
    """The settings of every slot, neutral where nothing was asked for, and what was damped in it."""

    def __init__(self, slots: int, layers: int, device: torch.device):
        self.gamma = torch.ones(slots, device=device)
        self.threshold = torch.full((slots, layers), torch.inf, device=device)
        self.measured = torch.zeros(slots, layers, 2, device=device)

    def place(self, slot: int, think: Think | None, thresholds: torch.Tensor | None) -> None:
        """Write a sequence's settings into its slot. thresholds: (layers,) where it thinks."""
        self.measured[slot] = 0
        self.gamma[slot] = 1.0 if think is None else think.gamma
        self.threshold[slot] = torch.inf if thresholds is None else thresholds.to(self.threshold)

    def move(self, source: int, target: int) -> None:
        """Copy a slot's settings to another slot."""
        for tensor in (self.gamma, self.threshold, self.measured):
            tensor[target] = tensor[source]

    def rows(
        self,
        slots: slice | list[int],
        thinks: Sequence[Think | None],
        real: torch.Tensor | None = None,
        keep: bool = False,
    ) -> ThinkRows | None:
        """The damping of a forward pass on some slots, None where none of them asks for any. real: (rows, n), by default
        one real token a row."""
        if not keep and all(think is None for think in thinks):
            return None
        if real is None:
            real = torch.ones(len(thinks), 1, device=self.gamma.device)
        return ThinkRows(self.gamma[slots], self.threshold[slots].T, real)

    def record(self, rows: ThinkRows | None, slots: slice | list[int], active: torch.Tensor | float = 1.0) -> None:
        """Add what a forward pass measured. active: (rows, 1, 1), 0 for rows whose step is for nothing."""
        if rows is not None:
            self.measured[slots] += rows.measured() * active
