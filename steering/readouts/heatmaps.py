"""Patch-attention maps laid over the pictures that the client sent, as PNG."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image

SIDE = 512
"""The longer side of an overlay in pixels, at most."""
COLOURS = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)])
"""From the weakest to the strongest, at equal distances: those of matplotlib's "inferno", whose import takes 40 MB."""
OPACITY = 0.75
"""How much of the picture the strongest patch hides; the weakest hides nothing."""


def overlay(picture: Image.Image, values: torch.Tensor, grid: tuple[int, int]) -> Image.Image:
    """The picture, at most `SIDE` long, under its map. values: (patches,), row by row of `grid` (rows, columns)."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    map_ = Image.fromarray(scaled.view(grid).float().numpy()).resize(small.size, Image.Resampling.BICUBIC)
    strength = np.asarray(map_).clip(0, 1)
    places = np.linspace(0, 1, len(COLOURS))
    colours = np.stack([np.interp(strength, places, channel) for channel in COLOURS.T], -1)
    opacity = (OPACITY * strength)[..., None]
    return Image.fromarray((np.asarray(small) * (1 - opacity) + colours * opacity).round().astype(np.uint8))


def data_url(picture: Image.Image) -> str:
    """The picture as a PNG in a data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
