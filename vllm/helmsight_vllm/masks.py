"""The masks of SAGE's Generate: which patches of pictures are occluded for the other side of a contrast.

They are those of Helmsight's engine (SAGE paper, section 5.1): where both the attention of the row before a token and that
token's activation map are strongest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from helmsight_vllm.noise import CHANNELS, PIXELS, with_pixels

GRID = "image_grid_thw"
FALLBACK = 0.05
"""The share of patches that are occluded where the two maps have none in common."""


def chosen_patches(attention: torch.Tensor, activation: torch.Tensor, top: float) -> torch.Tensor:
    """Return the patches, (patches,) bool, that are in the top of both maps; else the top of their product.

    Never all of them are chosen, nor one that is zero in both maps. Where the product is zero everywhere, attention decides,
    and where that is, activation does.
    """
    patches = len(attention)

    def highest(values: torch.Tensor, share: float) -> torch.Tensor:
        count = min(max(1, math.ceil(share * patches)), patches - 1)
        chosen = torch.zeros(patches, dtype=torch.bool)
        chosen[values.topk(count).indices] = True
        return chosen & (values > 0)

    overlap = highest(attention, top) & highest(activation, top)
    if bool(overlap.any()):
        return overlap
    maps = (attention * activation, attention, activation)
    return highest(next((values for values in maps if bool(values.any())), attention), FALLBACK)


def chosen_by_picture(
    attention: torch.Tensor, activation: torch.Tensor, sizes: Sequence[int], top: float
) -> list[list[int]]:
    """Return the numbers of the chosen patches of each picture, of maps (patches of all pictures,)."""
    parts = zip(attention.split(list(sizes)), activation.split(list(sizes)), strict=True)
    return [chosen_patches(attended, activated, top).nonzero()[:, 0].tolist() for attended, activated in parts]


def maskable(inputs: Any, tokens: Sequence[int]) -> bool:
    """Return True where the pictures' tokens, so many of each, are patches of their pixel values."""
    items = inputs.get("mm_kwargs", {}).get("image", ())
    return len(items) == len(tokens) and all(
        item is not None and GRID in item and item[PIXELS].data.ndim == 2 and len(item[PIXELS].data) % count == 0
        for item, count in zip(items, tokens, strict=True)
    )


def add_masks(inputs: Any, patches: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Fill these patches of each picture with its mean colour; its hash changes, so that caches do not mistake it."""
    items, hashes, masked = inputs["mm_kwargs"]["image"], inputs["mm_hashes"]["image"], []
    for item, chosen, count in zip(items, patches, tokens, strict=True):
        pixels = item[PIXELS].data.clone()
        # (patches before merging, channels * ...): patches that merge into one token are adjacent.
        by_token = pixels.view(count, -1, CHANNELS, pixels.shape[1] // CHANNELS)
        by_token[list(chosen)] = by_token.mean((0, 1, 3), keepdim=True)[0]
        masked.append(with_pixels(item, pixels))
    inputs["mm_kwargs"] = {**inputs["mm_kwargs"], "image": masked}
    names = [hashlib.sha256(f"{name} without {list(chosen)}".encode()).hexdigest()
             for name, chosen in zip(hashes, patches, strict=True)]  # fmt: skip
    inputs["mm_hashes"] = {**inputs["mm_hashes"], "image": names}
