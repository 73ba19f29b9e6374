"""The versioned envelope of readouts beside an answer; None (null) where a value does not exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from steering.diagnostics.flags import flags
from steering.diagnostics.focus import focus, image_attention_factor, m_lnd
from steering.diagnostics.heatmaps import data_url, overlay
from steering.diagnostics.modality import modality
from steering.diagnostics.options import Diagnose
from steering.diagnostics.residual import residual
from steering.diagnostics.sinks import discounted
from steering.layout import ImageSpan, Layout
from steering.sequence import Readings
from steering.spans import CONTEXT, FIRST_IMAGE, QUESTION

VERSION = 1


@dataclass(frozen=True)
class Surroundings:
    """What readouts need besides an answer's readings: N of the focus metrics, the text of a token, the request's pictures
    (where heat maps need them), and the model's sinks (layers, rows, columns) where they are known."""

    focus_layers: int
    token_text: Callable[[int], str] = str
    pictures: Sequence[Image.Image] = ()
    sinks: torch.Tensor | None = None


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
        return self.layout.count(QUESTION) + self.readings.output_rows

    @property
    def attention(self) -> tuple[torch.Tensor, ...]:
        """rho (layers, patches) of each image as it is to be judged: sinks discounted where that is asked for."""
        parts = self.by_image(self.readings.patches / max(self.rows, 1))
        return self.discounted(parts) if self.options.discount_sinks else parts

    def discounted(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """rho (layers, patches) of each image without its sinks; as it is where its tokens are no single grid."""
        sinks = self.around.sinks
        pairs = zip(parts, self.images, strict=True)
        return tuple(
            p if sinks is None or image.grid is None else discounted(p, sinks, image.grid) for p, image in pairs
        )

    def by_image(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts (..., patches of an image) of values (..., patches)."""
        return values.split(self.tokens.tolist(), -1)


def envelope(
    readings: Readings, layout: Layout, options: Diagnose, tokens: Sequence[int], around: Surroundings
) -> dict[str, Any]:
    """The diagnostics of a finished answer, which said `tokens`."""
    answer = _Answer(readings, layout, options, tokens, around)
    out: dict[str, Any] = {
        "version": VERSION,
        "images": [
            {"image": number, "tokens": image.tokens, "grid": list(image.grid) if image.grid else None}
            for number, image in enumerate(layout.images, start=1)
        ],
        "rows": {"question": layout.count(QUESTION), "output": readings.output_rows},
    }
    asked = options.include | ({"decay"} if "decay_layers" in options.include else set())  # which only adds to it
    out |= {name: read(answer) for name, read in _READOUTS.items() if name in asked}
    return out | ({"heatmaps": _heatmaps(answer)} if options.heatmaps else {})


def _focus(answer: _Answer) -> dict[str, Any] | None:
    if not answer.images or not answer.rows:
        return None
    sums = answer.readings.sums[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)]
    sigma = image_attention_factor(sums, answer.rows, answer.tokens)
    return focus(sigma, answer.focus_layers, answer.options.target_image)


def _modality(answer: _Answer) -> dict[str, Any]:
    sums = answer.readings.sums
    images = sums[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)].sum(1)
    return modality(images, sums[:, CONTEXT], int(answer.tokens.sum()), answer.layout.count(CONTEXT))


def _decay(answer: _Answer) -> dict[str, Any]:
    """Shares at each generated token, mean over layers; `slope`, by which that of vision changes a token (least squares)."""
    shares = answer.readings.decay  # (steps, layers, 3)
    mean = shares.nanmean(1)
    out: dict[str, Any] = {
        name: _numbers(values) for name, values in zip(("vision", "system", "user"), mean.T, strict=True)
    }
    out["slope"] = slope(mean[:, 0])
    if "decay_layers" in answer.options.include:
        by_layer = zip(("vision", "system", "user"), shares.permute(2, 0, 1), strict=True)
        out["by_layer"] = {name: [_numbers(step) for step in values] for name, values in by_layer}
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
    return residual(answer.readings.residual, answer.readings.output_rows + 1)


def _patches(answer: _Answer) -> list[dict[str, Any]] | None:
    """rho, by image, chosen layer and patch (row by row): mean attention over heads and rows (IVM paper, section 3)."""
    if not answer.rows:
        return None
    layers = answer.options.chosen_layers(len(answer.readings.patches))
    parts = answer.by_image(answer.readings.patches / answer.rows)
    out: list[dict[str, Any]] = [
        {"image": number, "layers": list(layers), "rho": part[list(layers)].tolist()}
        for number, part in enumerate(parts, start=1)
    ]
    if answer.options.discount_sinks:
        for one, part in zip(out, answer.discounted(parts), strict=True):
            one["discounted"] = part[list(layers)].tolist()
    return out


def _heatmaps(answer: _Answer) -> list[dict[str, Any]]:
    """Overlays of rho, mean over the chosen layers; None for an image whose tokens are no single grid."""
    layers = list(answer.options.chosen_layers(len(answer.readings.patches)))
    maps, pictures = answer.attention, answer.around.pictures
    out = []
    for number, (image, rho, picture) in enumerate(zip(answer.images, maps, pictures, strict=True), start=1):
        png = data_url(overlay(picture, rho[layers].mean(0), image.grid)) if image.grid else None
        out.append({"image": number, "kind": "rho", "layers": layers, "png": png})
    return out


def _tam(answer: _Answer) -> list[dict[str, Any]]:
    maps = answer.readings.tam
    if maps is None:
        return []
    return [
        {
            "position": position,
            "token": answer.around.token_text(answer.tokens_said[position]),
            "image": number,
            "map": part.tolist(),
        }
        for position, row in enumerate(maps)
        for number, part in enumerate(answer.by_image(row), start=1)
    ]


def _flags(answer: _Answer) -> dict[str, Any] | None:
    """By the attention of the last N layers and the maps of all tokens."""
    if answer.readings.tam is None or not answer.images:
        return None
    return flags(torch.cat(answer.attention, 1)[-answer.focus_layers :].sum(0), answer.readings.tam.sum(0))


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


def _numbers(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(x) else x for x in values.tolist()]
