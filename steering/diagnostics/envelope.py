"""The versioned envelope of readouts beside an answer; None (null) where a value does not exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from steering.diagnostics.flags import Thresholds, flags
from steering.diagnostics.focus import focus, image_attention_factor, m_lnd
from steering.diagnostics.heatmaps import data_url, overlay
from steering.diagnostics.modality import modality
from steering.diagnostics.numbers import known
from steering.diagnostics.options import Diagnose
from steering.diagnostics.residual import residual
from steering.diagnostics.sinks import discounted
from steering.layout import ImageSpan, Layout
from steering.sequence import Readings
from steering.spans import CONTEXT, FIRST_IMAGE
from steering.tiles import Tiling

VERSION = 2
"""Raised when a key changes its meaning."""


@dataclass(frozen=True)
class Surroundings:
    """What readouts need besides an answer's readings: N of the focus metrics, the text of a token, how each image is tiled
    (None where it is not, or nobody knows), the request's pictures (where heat maps need them), the model's sinks
    (layers, rows, columns) where they are known, and its thresholds of flags."""

    focus_layers: int
    token_text: Callable[[int], str] = str
    tilings: Sequence[Tiling | None] = ()
    pictures: Sequence[Image.Image] = ()
    sinks: torch.Tensor | None = None
    flags: Thresholds | None = None


@dataclass(frozen=True)
class _Map:
    """Values of one image's tokens: `whole` (..., patches) row by row of `grid`, which is None where they are no single
    grid, and those of a tile that shows the whole image again, small."""

    whole: torch.Tensor
    grid: tuple[int, int] | None
    overview: torch.Tensor | None = None

    @classmethod
    def of(cls, values: torch.Tensor, image: ImageSpan, tiling: Tiling | None) -> _Map:
        if tiling is None:
            return cls(values, image.grid)
        overview = values[..., tiling.overview] if len(tiling.overview) else None
        return cls(values[..., tiling.order], tiling.grid, overview)

    @property
    def everything(self) -> torch.Tensor:
        return self.whole if self.overview is None else torch.cat([self.whole, self.overview], -1)

    def without(self, sinks: torch.Tensor | None) -> _Map:
        """The same, of (layers, patches), less what places attract anyway; as it is without a grid."""
        if sinks is None or self.grid is None:
            return self
        return replace(self, whole=discounted(self.whole, sinks, self.grid))

    def json(self, name: str) -> dict[str, Any]:
        small = {} if self.overview is None else {"overview": self.overview.tolist()}
        return {name: self.whole.tolist(), **small}


@dataclass(frozen=True)
class _Answer:
    """One finished answer as its readouts see it."""

    readings: Readings
    layout: Layout
    options: Diagnose
    tokens_said: Sequence[int]
    around: Surroundings

    @property
    def focus_layers(self) -> int:
        return self.around.focus_layers

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return self.layout.images

    @property
    def tokens(self) -> torch.Tensor:
        """(images,) how many tokens each image has."""
        return torch.tensor([image.tokens for image in self.images])

    @property
    def rows(self) -> int:
        """Over how many query rows attention was averaged."""
        return sum(self.readings.rows)

    @property
    def tilings(self) -> Sequence[Tiling | None]:
        return self.around.tilings or [None] * len(self.images)

    def maps(self, values: torch.Tensor) -> list[_Map]:
        """Values (..., patches of all images), image by image."""
        parts = values.split(self.tokens.tolist(), -1)
        return [_Map.of(*one) for one in zip(parts, self.images, self.tilings, strict=True)]

    @property
    def attention(self) -> list[_Map]:
        """rho (layers, patches) of each image as it is to be judged: sinks discounted where that is asked for."""
        maps = self.maps(self.readings.patches / self.rows)
        return [map_.without(self.around.sinks) for map_ in maps] if self.options.discount_sinks else maps


def envelope(
    readings: Readings, layout: Layout, options: Diagnose, tokens: Sequence[int], around: Surroundings
) -> dict[str, Any]:
    """The diagnostics of a finished answer, which said `tokens`."""
    answer = _Answer(readings, layout, options, tokens, around)
    out: dict[str, Any] = {
        "version": VERSION,
        "images": [_image(*one) for one in enumerate(zip(layout.images, answer.tilings, strict=True), start=1)],
        "rows": readings.rows._asdict(),
    }
    asked = options.include | ({"decay"} if "decay_layers" in options.include else set())  # which only adds to it
    out |= {name: read(answer) for name, read in _READOUTS.items() if name in asked}
    return out | ({"heatmaps": _heatmaps(answer)} if options.heatmaps else {})


def _image(number: int, shown: tuple[ImageSpan, Tiling | None]) -> dict[str, Any]:
    image, tiling = shown
    grid = image.grid if tiling is None else tiling.grid
    small = {"overview": list(tiling.overview_grid)} if tiling is not None and len(tiling.overview) else {}
    return {"image": number, "tokens": image.tokens, "grid": list(grid) if grid else None, **small}


def _focus(answer: _Answer) -> dict[str, Any] | None:
    if not answer.images:
        return None
    sums = answer.readings.sums[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)]
    sigma = image_attention_factor(sums, answer.rows, answer.tokens)
    return focus(sigma, answer.focus_layers, answer.options.target_image)


def _modality(answer: _Answer) -> dict[str, Any]:
    sums = answer.readings.modality
    images = sums[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)].sum(1)
    ratio = modality(images, sums[:, CONTEXT], int(answer.tokens.sum()), answer.layout.count(CONTEXT))
    return ratio | {"rows": answer.readings.modality_rows._asdict()}


def _decay(answer: _Answer) -> dict[str, Any]:
    """Shares at each generated token, mean over layers; `slope`, by which that of vision changes a token (least squares)."""
    shares = answer.readings.decay  # (steps, layers, 3)
    mean = shares.nanmean(1)
    out: dict[str, Any] = {
        name: known(values) for name, values in zip(("vision", "system", "user"), mean.T, strict=True)
    }
    out["spans"] = answer.options.spans
    out["slope"] = slope(mean[:, 0]) if answer.images else None
    if "decay_layers" in answer.options.include:
        by_layer = zip(("vision", "system", "user"), shares.permute(2, 0, 1), strict=True)
        out["by_layer"] = {name: [known(step) for step in values] for name, values in by_layer}
    return out


def slope(values: torch.Tensor) -> float | None:
    """The slope of the least-squares line through values (steps,) against their number; None for fewer than two."""
    steps = torch.arange(len(values), dtype=torch.float64)[values.isfinite()]
    known = values[values.isfinite()].double()
    if len(known) < 2:
        return None
    steps = steps - steps.mean()
    return float((steps * (known - known.mean())).sum() / (steps * steps).sum())


def _residual(answer: _Answer) -> dict[str, Any]:
    kind, output = answer.options.residual_rows, answer.readings.output
    rows = {"answer": output + 1, "prompt": len(answer.layout.spans), "generated": output}[kind]
    neurons = answer.readings.neurons
    return residual(answer.readings.residual, rows, neurons if output else neurons * math.nan, kind)


def _patches(answer: _Answer) -> list[dict[str, Any]]:
    """rho, by image, chosen layer and patch (row by row): mean attention over heads and rows (IVM paper, section 3)."""
    layers = list(answer.options.chosen_layers(len(answer.readings.patches)))
    maps = answer.maps(answer.readings.patches[layers] / answer.rows)
    out: list[dict[str, Any]] = [
        {"image": number, "layers": layers, **map_.json("rho")} for number, map_ in enumerate(maps, start=1)
    ]
    if answer.options.discount_sinks:
        for one, map_ in zip(out, answer.attention, strict=True):
            one["discounted"] = map_.whole[layers].tolist()
    return out


def _heatmaps(answer: _Answer) -> list[dict[str, Any]]:
    """Overlays of rho, mean over the chosen layers; None for an image whose tokens are no single grid."""
    layers = list(answer.options.chosen_layers(len(answer.readings.patches)))
    out = []
    for number, (map_, picture) in enumerate(zip(answer.attention, answer.around.pictures, strict=True), start=1):
        png = data_url(overlay(picture, map_.whole[layers].mean(0), map_.grid)) if map_.grid else None
        out.append({"image": number, "kind": "rho", "layers": layers, "png": png})
    return out


def _tam(answer: _Answer) -> list[dict[str, Any]]:
    if answer.readings.tam is None:
        return []
    out = []
    for position, row in enumerate(answer.readings.tam):
        token = answer.around.token_text(answer.tokens_said[position])
        for number, map_ in enumerate(answer.maps(row), start=1):
            out.append({"position": position, "token": token, "image": number, **map_.json("map")})
    return out


def _flags(answer: _Answer) -> dict[str, Any] | None:
    """By the attention of all layers and the maps of all tokens; thresholds hold for maps whose sinks are not discounted."""
    if answer.readings.tam is None or not answer.images:
        return None
    attention = torch.cat([map_.everything for map_ in answer.attention], 1).mean(0)
    activation = torch.cat([map_.everything for map_ in answer.maps(answer.readings.tam.sum(0))])
    return flags(attention, activation, None if answer.options.discount_sinks else answer.around.flags)


def _anchor(answer: _Answer) -> dict[str, Any] | None:
    """The image-attention factor between images: the last image's rows, the images before it (IVM paper, section 3)."""
    before = len(answer.images) - 1
    if before < 1:
        return None
    sums = answer.readings.anchor[:, FIRST_IMAGE : FIRST_IMAGE + before]
    sigma = image_attention_factor(sums, answer.images[-1].tokens, answer.tokens[:before])
    image = m_lnd(sigma[-answer.focus_layers :])
    return {"sigma": sigma.tolist(), "image": None if image is None else image + 1}


_READOUTS: dict[str, Callable[[_Answer], Any]] = {
    "focus": _focus,
    "modality": _modality,
    "decay": _decay,
    "residual": _residual,
    "patches": _patches,
    "tam": _tam,
    "flags": _flags,
    "anchor": _anchor,
}
