"""SAGE's third stage, Generate: logits are contrasted with those of a masked image (SAGE paper, section 5.1, eq. 6 and 7).

A twin row answers the same prompt, its images occluded where both the visual attention map and the Token Activation Map
of the first token are strongest; logits + lambda * ReLU(logits - logits of the twin) decide every token. The mask may be
rebuilt as the answer goes on: a new twin then takes in the prompt with new images and the answer so far.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from steering.diagnostics.tam import activation_maps
from steering.errors import RequestError
from steering.interventions.contrast import Rule
from steering.layout import ImageSpan, Prompt


@dataclass(frozen=True)
class Generate:
    """`weight` is lambda; `top` the share of an image's patches that each map puts forward; the mask is rebuilt every
    `refresh` tokens, 0 for never."""

    weight: float = 0.5
    top: float = 0.2
    refresh: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and 0 <= self.weight <= 10):
            raise RequestError(
                f"'sage.generate.lambda' must be from 0 to 10; got {self.weight}.", param="sage.generate.lambda"
            )
        if not 0 < self.top < 1:
            raise RequestError(
                f"'sage.generate.top' must be above 0 and below 1; got {self.top}.", param="sage.generate.top"
            )
        if self.refresh < 0:
            raise RequestError(
                f"'sage.generate.refresh' must be at least 0; got {self.refresh}.", param="sage.generate.refresh"
            )

    @property
    def rule(self) -> Rule:
        """Equation 7."""
        return Rule(self.weight, relu=True)


@dataclass(frozen=True)
class Mask:
    """What is occluded for a twin: `chosen` (patches,) bool for each image, in its `pixels` or else in its features; `token`
    is the first generated token, from 0, that it decides."""

    chosen: tuple[torch.Tensor, ...]
    pixels: bool
    token: int = 0

    @property
    def patches(self) -> list[list[int]]:
        """The occluded patches of each image, row by row from 0."""
        return [chosen.nonzero()[:, 0].tolist() for chosen in self.chosen]


def report(masks: Sequence[Mask], changed: int) -> dict[str, Any]:
    """What was done: the patches occluded at first and by every rebuilt mask, and how many tokens it changed."""
    return {
        "masking": "pixels" if masks[0].pixels else "features",
        "masked": masks[0].patches,
        "rebuilt": [{"token": mask.token, "masked": mask.patches} for mask in masks[1:]],
        "changed": changed,
    }


def chosen_patches(attention: torch.Tensor, activation: torch.Tensor, top: float) -> torch.Tensor:
    """(patches,) bool: in the top of both maps or, where they have none in common, the top 5 % of their product.

    Never all patches of an image, nor one that is zero in both maps. Where the product is zero everywhere, attention
    decides, and where no layer sees the image, activation. attention, activation: (patches,), at least two.
    """
    patches = len(attention)

    def highest(values: torch.Tensor, share: float) -> torch.Tensor:
        count = min(max(1, math.ceil(share * patches)), patches - 1)
        chosen = torch.zeros(patches, dtype=torch.bool, device=values.device)
        chosen[values.topk(count).indices] = True
        return chosen & (values > 0)

    both = highest(attention, top) & highest(activation, top)
    if bool(both.any()):
        return both
    maps = (attention * activation, attention, activation)
    return highest(next((values for values in maps if bool(values.any())), attention), 0.05)


def can_mask_pixels(inputs: Mapping[str, torch.Tensor], images: Sequence[ImageSpan]) -> bool:
    """Whether image tokens are rectangles of one picture in the processor's tensors, and not of tiles."""
    pixels = inputs["pixel_values"]
    whole = pixels.ndim == 4 and len(pixels) == len(images) and all(image.grid is not None for image in images)
    return "image_grid_thw" in inputs or whole


def masked_pixels(
    inputs: Mapping[str, torch.Tensor], images: Sequence[ImageSpan], chosen: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """The processor's tensors with the chosen patches (patches,) of each image filled with the image's mean colour.

    None where image tokens are no rectangles of one picture (tiles); then features are to be masked instead. What the
    processor made is filled and not the picture before it, so that cutting and scaling cannot shift the patches.
    """
    if not can_mask_pixels(inputs, images):
        return None
    pixels = inputs["pixel_values"].clone()
    if (grids := inputs.get("image_grid_thw")) is not None:
        # (patches before merging, channels * ...): those that merge into one token follow each other.
        channels = 3
        for picture, mask in zip(pixels.split(grids.prod(-1).tolist()), chosen, strict=True):
            by_token = picture.view(len(mask), -1, channels, picture.shape[1] // channels)
            by_token[mask.to(pixels.device)] = by_token.mean((0, 1, 3), keepdim=True)[0]
    else:
        whole = [pixels.shape[2:]] * len(images)
        for padded, size, image, mask in zip(pixels, inputs.get("image_sizes", whole), images, chosen, strict=True):
            picture = padded[:, : int(size[0]), : int(size[1])]
            rows, columns = image.grid or (1, 1)
            height, width = picture.shape[1] / rows, picture.shape[2] / columns
            mean = picture.mean((1, 2), keepdim=True)
            for patch in mask.nonzero()[:, 0].tolist():
                row, column = divmod(patch, columns)
                block = picture[
                    :,
                    round(row * height) : round((row + 1) * height),
                    round(column * width) : round((column + 1) * width),
                ]
                block[:] = mean
    return {**inputs, "pixel_values": pixels}


def masked_features(embeds: torch.Tensor, images: Sequence[ImageSpan], chosen: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decoder inputs (1, n, d) with the chosen tokens of each image replaced by the mean of the image's tokens."""
    embeds = embeds.clone()
    for image, mask in zip(images, chosen, strict=True):
        columns = image.columns.to(embeds.device)
        embeds[0, columns[mask.to(embeds.device)]] = embeds[0, columns].mean(0)
    return embeds


def mask_of(
    prompt: Prompt, states: torch.Tensor, attention: torch.Tensor, head: torch.Tensor, top: float, token: int
) -> Mask:
    """What to occlude for the twin of a prompt from generated token `token` on.

    states: (image tokens, d), normalised, after the last layer, image by image. attention: (columns,), of the row before the
    token. head: (d,), the token's row of the output embedding.
    """
    images = prompt.layout.images
    parts = activation_maps(states, head[None])[0].split([image.tokens for image in images])
    chosen = [
        chosen_patches(attention[image.columns.to(attention.device)], part, top).cpu()
        for image, part in zip(images, parts, strict=True)
    ]
    return Mask(tuple(chosen), can_mask_pixels(prompt.inputs, images), token)
