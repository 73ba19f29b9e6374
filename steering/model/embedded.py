"""Prompts as the decoder takes them: embedded, positioned, ready to be cut into chunks or joined into a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Overlay:
    """Features that the decoder adds to some tokens between its first layers (DeepStack).

    mask: (rows, n) bool, the tokens, under the decoder's argument `name`. features: by argument, per layer (k, d), one row
    for each True of the mask, in order. marked: the mask on the CPU.
    """

    name: str
    mask: torch.Tensor
    features: dict[str, list[torch.Tensor]]
    marked: torch.Tensor

    @classmethod
    def find(cls, extras: Mapping[str, Any], length: int, images: torch.Tensor) -> Overlay | None:
        """Return the overlay in a decoder's further arguments, None if they are anything else.

        images: (1, length) bool on the CPU, the tokens of images, which are those of an overlay.
        """
        masks = {key: value for key, value in extras.items() if isinstance(value, torch.Tensor)}
        features = {key: list(value) for key, value in extras.items() if isinstance(value, list)}
        if len(masks) != 1 or len(features) + 1 != len(extras):
            return None
        ((name, mask),) = masks.items()
        if mask.dtype != torch.bool or mask.shape != (1, length):
            return None
        count = int(images.sum())
        laid = all(layer.ndim == 2 and len(layer) == count for value in features.values() for layer in value)
        return cls(name, mask, features, images) if laid else None

    def cut(self, start: int, end: int) -> Overlay:
        """Return the part on tokens start..end of a single prompt."""
        first, last = int(self.marked[:, :start].sum()), int(self.marked[:, :end].sum())
        features = {name: [layer[first:last] for layer in value] for name, value in self.features.items()}
        return Overlay(self.name, self.mask[:, start:end], features, self.marked[:, start:end])

    @staticmethod
    def join(overlays: Sequence[Overlay | None], width: int) -> Overlay | None:
        """Join overlays of prompts padded on the right to `width`; a prompt without images has none."""
        template = next((overlay for overlay in overlays if overlay is not None), None)
        if template is None:
            return None
        mask, marked = template.mask.new_zeros(len(overlays), width), template.marked.new_zeros(len(overlays), width)
        for row, overlay in enumerate(overlays):
            if overlay is not None:
                mask[row, : overlay.mask.shape[1]] = overlay.mask[0]
                marked[row, : overlay.mask.shape[1]] = overlay.marked[0]
        present = [overlay for overlay in overlays if overlay is not None]
        features = {
            name: [torch.cat([overlay.features[name][layer] for overlay in present]) for layer in range(len(value))]
            for name, value in template.features.items()
        }
        return Overlay(template.name, mask, features, marked)


@dataclass
class Embedded:
    """The arguments that the language model's decoder receives for prompts of up to n tokens.

    embeds: (rows, n, d). positions: (rows, n) or (axes, rows, n) for multi-axis rotary positions. mask: None where attention
    is plainly causal, else as the wrapper built it (4-D, or a dict of them). by_token: the decoder's further inputs of each
    token, (rows, n, ...) each. extras: its other arguments. last: the greatest position, where it is known without a device
    sync.
    """

    embeds: torch.Tensor
    positions: torch.Tensor
    mask: Any = None
    overlay: Overlay | None = None
    by_token: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    last: int | None = None

    @property
    def length(self) -> int:
        return self.embeds.shape[1]

    @property
    def rope_delta(self) -> int | torch.Tensor:
        """The difference between the next rotary position and the cache length (mrope compresses images).

        It is a tensor () on the positions' device where it would be known after a sync only.
        """
        return (self.positions.max() if self.last is None else self.last) + 1 - self.length

    @property
    def divisible(self) -> bool:
        """True if it may be cut into chunks or joined into a batch: it is causal, and every argument is understood."""
        return self.mask is None and not self.extras

    @property
    def plain(self) -> bool:
        """True if embeddings and positions are all that the decoder receives."""
        return self.divisible and self.overlay is None and not self.by_token

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments for the decoder."""
        laid = {self.overlay.name: self.overlay.mask, **self.overlay.features} if self.overlay is not None else {}
        return {
            "inputs_embeds": self.embeds,
            "position_ids": self.positions,
            "attention_mask": self.mask,
            **laid,
            **self.by_token,
            **self.extras,
        }

    def cut(self, start: int, end: int) -> Embedded:
        """Return tokens start..end of a single prompt, which must be divisible unless that is all of it."""
        if (start, end) == (0, self.length):
            return self
        overlay = self.overlay.cut(start, end) if self.overlay is not None else None
        by_token = {name: value[:, start:end] for name, value in self.by_token.items()}
        return Embedded(self.embeds[:, start:end], self.positions[..., start:end], None, overlay, by_token)

    @staticmethod
    def join(prompts: Sequence[Embedded]) -> Embedded:
        """Join several divisible prompts into one batch, padded on the right, which a causal mask never reads.

        Padded positions go on counting: transformers would take a jump back for the start of a packed sequence. Where only
        prompts with images have positions on several axes, those of a text are the same on each.
        """
        axes = next((prompt.positions.shape[:1] for prompt in prompts if prompt.positions.ndim == 3), ())
        width = max(prompt.length for prompt in prompts)
        embeds = _padded([prompt.embeds for prompt in prompts], width)
        by_token = {name: _padded([prompt.by_token[name] for prompt in prompts], width) for name in prompts[0].by_token}
        positions = []
        for prompt in prompts:
            positions_of_prompt = prompt.positions.expand(*axes, 1, -1)
            beyond = positions_of_prompt[..., -1:] + 1 + torch.arange(width - prompt.length, device=embeds.device)
            positions.append(torch.cat([positions_of_prompt, beyond], dim=-1))
        overlay = Overlay.join([prompt.overlay for prompt in prompts], width)
        return Embedded(embeds, torch.cat(positions, dim=-2), None, overlay, by_token)


def _padded(values: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Join tensors (1, n, ...) of different n into (rows, width, ...), padded with zeros on the right."""
    padded = values[0].new_zeros(len(values), width, *values[0].shape[2:])
    for row, value in enumerate(values):
        padded[row, : value.shape[1]] = value[0]
    return padded
