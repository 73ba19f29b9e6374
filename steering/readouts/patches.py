"""rho, by image, layer and patch: mean attention over heads and rows (IVM paper, section 3), as numbers and as pictures."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import torch
from PIL import Image

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout
from steering.protocol.signals import Signal
from steering.readouts.maps import attention_maps, judged_maps
from steering.recorders.attention import NAME

SIDE = 512
"""The longer side of an overlay in pixels, at most."""
COLOURS = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)])
"""From the weakest to the strongest, at equal distances: those of matplotlib's "inferno", whose import takes 40 MB."""
OPACITY = 0.75
"""How much of the picture the strongest patch hides; the weakest hides nothing."""
_STRENGTHS = np.linspace(0, 1, 256)
_PLACES = np.linspace(0, 1, len(COLOURS))
PALETTE = np.stack([np.interp(_STRENGTHS, _PLACES, one).round() for one in COLOURS.T], -1).astype(np.uint8).tobytes()
OPACITIES = (255 * OPACITY * _STRENGTHS).round().astype(int).tolist()
"""By strength, of 0 to 255."""


def overlay(picture: Image.Image, values: torch.Tensor, grid: tuple[int, int]) -> Image.Image:
    """The picture, at most `SIDE` long, under its map. values: (patches,), row by row of `grid` (rows, columns)."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    map_ = Image.fromarray(scaled.view(grid).float().numpy()).resize(small.size, Image.Resampling.BICUBIC)
    strength = Image.fromarray((np.asarray(map_).clip(0, 1) * 255).round().astype(np.uint8))
    coloured = strength.convert("P")
    coloured.putpalette(PALETTE)
    small.paste(coloured.convert("RGB"), mask=strength.point(OPACITIES))
    return small


def data_url(picture: Image.Image) -> str:
    """The picture as a PNG in a data URL."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)  # less time than others, and fewer bytes
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class PatchesReadout(Readout):
    """The maps of the chosen layers; beside them, where that is asked for, less what places attract anyway."""

    name = "patches"

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        return len(options.chosen_layers(layers)) * patches * (1 + options.discount_sinks)

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        layers = _layers(answer)
        out: list[dict[str, Any]] = [
            {"image": number, "layers": layers, **map_.at(layers).json("rho")}
            for number, map_ in enumerate(attention_maps(answer), start=1)
        ]
        if answer.options.discount_sinks:
            for one, map_ in zip(out, judged_maps(answer), strict=True):
                one["discounted"] = map_.whole[layers].tolist()
        return out


class HeatmapsReadout(Readout):
    """Overlays of rho, mean over the chosen layers, on the pictures; None for an image whose tokens are no single grid."""

    name = "heatmaps"
    needs_pictures = True

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def asked_beside(self, options: Diagnose) -> bool:
        return options.heatmaps

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        layers, out = _layers(answer), []
        for number, (map_, picture) in enumerate(
            zip(judged_maps(answer), answer.around.pictures, strict=True), start=1
        ):
            png = data_url(overlay(picture, map_.whole[layers].mean(0), map_.grid)) if map_.grid else None
            out.append({"image": number, "kind": "rho", "layers": layers, "png": png})
        return out


def _layers(answer: FinishedAnswer) -> list[int]:
    return list(answer.options.chosen_layers(len(answer.taken[NAME].patches)))
