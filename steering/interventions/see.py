"""SAGE's first stage, See: attention to images is enhanced (SAGE paper, section 5.1, equations 3 and 4).

The formula is lost in the paper's text; both readings are here. With alpha of a row in a layer, m_v and m_t its attention
to the images and to the rest of the prompt (a_s and a_u of the paper: what stands before the first image, and all else):

- "transfer", the default: a share alpha of m_t moves to the images, in proportion to the weights inside them. The sentence
  behind the formula names a_s and a_u, for which nothing else has a use;
- "scale": visual weights times (1 + alpha), then the row is normalised again.

The rest of the prompt is all of it, template included, as in the authors' scripts, or with `spans` "content" the messages'
texts alone.

Shallow layers have the fixed alpha, in every row. Deeper ones have alpha * clip(decay, 0, ceiling) in the rows of
generated tokens, decay = 1 - m_v(t) / m_v(1), where t = 1 is the prompt's last row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steering.errors import RequestError
from steering.spans import FIRST_IMAGE, PARTITIONS, SYSTEM

READINGS = ("transfer", "scale")
LEAST = torch.finfo(torch.float32).tiny
"""Less attention to images than this cannot be divided by, and is none."""


@dataclass(frozen=True)
class See:
    """`shallow` layers, counted from the first, have the fixed alpha (None: the model's first quarter)."""

    alpha: float = 0.1
    reading: str = READINGS[0]
    shallow: int | None = None
    ceiling: float = 1.0
    spans: str = PARTITIONS[0]

    def __post_init__(self) -> None:
        for name, value, high in (("alpha", self.alpha, 1.0), ("ceiling", self.ceiling, 1.0)):
            if not (math.isfinite(value) and 0 <= value <= high):
                raise RequestError(
                    f"'sage.see.{name}' must be from 0 to {high:g}; got {value}.", param=f"sage.see.{name}"
                )
        for name, word, known in (("reading", self.reading, READINGS), ("spans", self.spans, PARTITIONS)):
            if word not in known:
                raise RequestError(
                    f"'sage.see.{name}' must be one of {', '.join(known)}; got {word!r}.", param=f"sage.see.{name}"
                )

    def depth(self, layers: int) -> int:
        """How many of a model's layers are shallow; raises RequestError when it has fewer than asked for."""
        if self.shallow is not None and not 0 <= self.shallow <= layers:
            raise RequestError(
                f"'sage.see.shallow' must be from 0 to {layers}, the model's layers; got {self.shallow}.",
                param="sage.see.shallow",
            )
        return max(1, layers // 4) if self.shallow is None else self.shallow


class SeeRows:
    """The enhancement of one forward pass.

    masks: (rows, columns, 2), 1 on the columns of images, and of the rest of the prompt. fixed, adaptive: (layers, rows),
    alpha of shallow and of deeper layers, 0 elsewhere. first: (layers, rows), m_v(1). ceiling: (rows,). transfer: (rows,)
    bool, the reading, None where every row scales. depths: in how many layers some row is shallow, and how many are shallow
    in every row. generated: whether the rows are generated tokens, whose decay is measured, or prompts.
    asked: (rows, 1, 1, 1) bool, the rows whose attention changes.
    """

    def __init__(
        self,
        masks: torch.Tensor,
        fixed: torch.Tensor,
        adaptive: torch.Tensor,
        first: torch.Tensor,
        ceiling: torch.Tensor,
        transfer: torch.Tensor | None,
        depths: tuple[int, int],
        generated: bool,
    ):
        # All that does not depend on a layer's attention is made once: a decode step is short.
        self.depth, self._common_depth = depths
        self.generated = generated
        self.asked = (fixed + adaptive).any(0)[:, None, None, None]
        self.masks = masks if transfer is not None else masks[..., :1]  # what has no say need not be summed
        self._visual, self._text = (mask.contiguous() for mask in masks[:, None, None].unbind(-1))
        self._fixed = fixed[:, :, None].unbind()
        self._transfer = None if transfer is None else transfer[:, None, None, None]
        # alpha * clip(1 - m_v(t) / m_v(1), 0, ceiling) = clip(alpha - m_v(t) * alpha / m_v(1), 0, alpha * ceiling)
        seen = first > 0  # a layer whose window held no image does not decay
        self._from = (adaptive * seen)[:, :, None].unbind()
        self._fall = torch.where(seen, -adaptive / first, 0.0)[:, :, None].unbind()
        self._most = (adaptive * ceiling)[:, :, None].unbind()
        self._zero, self._one = torch.zeros((), device=masks.device), torch.ones((), device=masks.device)
        self._steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def enhance(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, n, columns) of shallow layers, and of deeper ones where the queries are generated
        tokens."""
        rows, heads, n, columns = weights.shape
        masses = (weights.view(rows, -1, columns) @ self.masks).view(rows, heads, n, -1)
        seen = masses[..., :1]
        alpha = self._alpha(layer, seen)
        up, down, total = self._factors(alpha, seen, masses[..., 1:])
        if self.generated:
            self._steps.append((alpha, seen, up, total))
        gain = torch.addcmul(self._one, up, self._visual)
        if down is not None:
            gain = torch.addcmul(gain, down, self._text, value=-1)
        return (weights * gain).div_(total)

    def _alpha(self, layer: int, seen: torch.Tensor) -> torch.Tensor:
        """(rows, n or 1). seen: (rows, heads, n, 1), m_v."""
        if not self.generated or layer < self._common_depth:
            return self._fixed[layer]
        deep = torch.addcmul(self._from[layer], seen.mean((1, 3)), self._fall[layer])
        deep = deep.clamp_(self._zero, self._most[layer])
        return deep if layer >= self.depth else self._fixed[layer] + deep

    def attend(self, layer: int, value: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A shallow layer's output (rows, heads, n, head_dim) without its weights: `attend` gives the weights' product
        with any values (rows, kv_heads, columns, head_dim), and m_v and m_t are such products. All is float32: what is
        divided by may be smaller than half precision can tell from nothing."""
        masks = self.masks[:, None]
        indicators = torch.zeros_like(value)
        indicators[..., : masks.shape[-1]] = masks
        masses = attend(indicators)
        up, down, total = self._factors(self._fixed[layer], masses[..., :1], masses[..., 1:2])
        more = up * attend(value * masks[..., :1])
        if down is not None:
            more = more - down * attend(value * masks[..., 1:])
        return (attend(value) + more) / total

    def _factors(
        self, alpha: torch.Tensor, seen: torch.Tensor, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """By how much visual weights rise and text weights fall, as shares of themselves, and what normalises the row.

        alpha: (rows, n or 1). seen, read: (rows, heads, n, 1), m_v and m_t. A row that sees no image is left as it is.
        """
        alpha = alpha[:, None, :, None]
        if self._transfer is None:
            return alpha, None, torch.addcmul(self._one, alpha, seen)
        moved = alpha * (seen >= LEAST)
        up = torch.where(self._transfer, moved * read / seen.clamp(min=LEAST), alpha)
        return up, moved * self._transfer, torch.where(self._transfer, 1.0, 1 + alpha * seen)

    def measured(self) -> torch.Tensor:
        """What a decode did: (layers, rows, 3), alpha, and m_v before and after, means over heads."""
        alpha, seen, up, total = (torch.stack(values) for values in zip(*self._steps, strict=True))
        after = seen * (1 + up) / total
        return torch.stack([alpha[..., 0], seen.mean((2, 3, 4)), after.mean((2, 3, 4))], -1)


class SeeSlots:
    """The settings of every slot, neutral where nothing was asked for, and what each generated token saw."""

    def __init__(self, slots: int, length: int, layers: int, device: torch.device):
        self.layers = layers
        self.masks = torch.zeros(slots, length, 2, device=device)
        self.fixed = torch.zeros(slots, layers, device=device)
        self.adaptive = torch.zeros(slots, layers, device=device)
        self.first = torch.zeros(slots, layers, device=device)
        self.ceiling = torch.zeros(slots, device=device)
        self.transfer = torch.zeros(slots, dtype=torch.bool, device=device)
        self.steps = torch.zeros(slots, length, 4, device=device)  # alpha: mean, greatest; m_v: before, after

    @property
    def _tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.masks, self.fixed, self.adaptive, self.first, self.ceiling, self.transfer, self.steps)

    def place(self, slot: int, see: See | None, spans: torch.Tensor) -> None:
        """Write a sequence's settings into its slot. spans: (n,), the prompt's span numbers."""
        for tensor in self._tensors:
            tensor[slot] = 0
        if see is None:
            return
        depth = see.depth(self.layers)
        image = spans >= FIRST_IMAGE
        rest = ~image if see.spans == "whole" else (spans >= SYSTEM) & ~image
        self.masks[slot, : len(spans)] = torch.stack([image, rest], -1).to(self.masks)
        self.fixed[slot, :depth] = see.alpha
        self.adaptive[slot, depth:] = see.alpha
        self.ceiling[slot] = see.ceiling
        self.transfer[slot] = see.reading == "transfer"

    def move(self, source: int, target: int) -> None:
        """Copy a slot's settings to another slot."""
        for tensor in self._tensors:
            tensor[target] = tensor[source]

    def rows(
        self, slots: slice | list[int], sees: Sequence[See | None], columns: int, generated: bool
    ) -> SeeRows | None:
        """The enhancement of a forward pass on some slots, which reads the first `columns` of them; None where no row asks
        for any."""
        asked = [see for see in sees if see is not None]
        if not asked:
            return None
        depths = [see.depth(self.layers) for see in asked]
        return SeeRows(
            self.masks[slots, :columns],
            self.fixed[slots].T,
            self.adaptive[slots].T,
            self.first[slots].T,
            self.ceiling[slots],
            self.transfer[slots] if any(see.reading == "transfer" for see in asked) else None,
            (max(depths), min(depths)),
            generated,
        )

    def record(self, rows: SeeRows, positions: torch.Tensor) -> None:
        """Keep what a decode measured. positions: (rows,)."""
        alpha, before, after = rows.measured().unbind(-1)  # (layers, rows)
        steps = torch.stack([alpha.mean(0), alpha.amax(0), before.mean(0), after.mean(0)], -1)
        self.steps[torch.arange(len(positions), device=positions.device), positions] = steps


def report(see: See, steps: torch.Tensor) -> dict[str, Any]:
    """What was done. steps: (tokens, 4) as `SeeSlots.steps`, one for each generated token that went through the model."""
    mean, greatest, before, after = steps.T.tolist() if len(steps) else ([], [], [], [])
    return {
        "reading": see.reading,
        "spans": see.spans,
        "alpha": mean,
        "alpha_max": greatest,
        "share_before": sum(before) / len(before) if before else None,
        "share_after": sum(after) / len(after) if after else None,
    }
