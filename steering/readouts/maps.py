"""Maps of image tokens: values image by image, row by row of an image's grid, tiles put together.

Attention sinks are places of an image that attract attention whatever the picture and the question, often its border. They
are measured once per model (`helmsight probe --calibrate-sinks`): by layer, how many times the average patch's attention a
place gets, mean over calibration prompts. Discounting divides a patch's attention by that factor where it exceeds 1; it
never raises any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import ImageSpan, Layout
from steering.prompt.tiles import Tiling
from steering.protocol.readout import FinishedAnswer, ReadoutOption
from steering.recorders.attention import NAME, Attention


def _is_calibrated(value: bool, mllm: MLLM, layout: Layout) -> None:
    if value and (mllm.calibration is None or mllm.calibration.sinks is None):
        raise RequestError(
            f"{mllm.name} was not calibrated for 'diagnostics.discount_sinks'; run 'helmsight probe --calibrate-sinks' on "
            "it.",
            param="diagnostics.discount_sinks",
        )


DISCOUNT_SINKS = ReadoutOption.flag("discount_sinks", "Add patch maps with attention sinks discounted.", _is_calibrated)


def attraction(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each place's attention relative to the average patch, (layers, rows, columns), on the most frequent grid.

    maps: (layers, rows, columns) each, attention of one image's patches; a layer that does not see an image does not count.
    """
    rows, columns = Counter(tuple(map_.shape[1:]) for map_ in maps).most_common(1)[0][0]
    relative = torch.stack([_resized(map_ / map_.mean((1, 2), keepdim=True), rows, columns) for map_ in maps])
    return relative.nanmean(0).nan_to_num(1.0)


def discounted(rho: torch.Tensor, sinks: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Return rho (layers, patches) of an image with a grid with its sinks discounted. sinks: (layers, rows, columns)."""
    return rho / _resized(sinks, *grid).clamp(min=1.0).flatten(1)


def _resized(map_: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.interpolate(map_[None], (rows, columns), mode="bilinear", antialias=True)[0]


@dataclass(frozen=True)
class Map:
    """Values of one image's tokens.

    `whole` (..., patches) are row by row of `grid`, which is None where they form no single grid; `overview` are those of a
    tile that shows the whole image again in small.
    """

    whole: torch.Tensor
    grid: tuple[int, int] | None
    overview: torch.Tensor | None = None

    @classmethod
    def of(cls, values: torch.Tensor, image: ImageSpan, tiling: Tiling | None) -> Map:
        """Make a map of values (..., tokens) in the order of the image's tokens."""
        if tiling is None:
            return cls(values, image.grid)
        overview = values[..., tiling.overview] if len(tiling.overview) else None
        return cls(values[..., tiling.order], tiling.grid, overview)

    @property
    def everything(self) -> torch.Tensor:
        """All values, (..., patches), those of the overview after the others."""
        return self.whole if self.overview is None else torch.cat([self.whole, self.overview], -1)

    def without(self, sinks: torch.Tensor | None) -> Map:
        """Return the map, of (layers, patches), with sinks discounted; a map without a grid stays as it is."""
        if sinks is None or self.grid is None:
            return self
        return replace(self, whole=discounted(self.whole, sinks, self.grid))

    def at(self, layers: list[int]) -> Map:
        """Return the map, of (layers, patches), at some layers alone."""
        overview = None if self.overview is None else self.overview[layers]
        return replace(self, whole=self.whole[layers], overview=overview)

    def json(self, name: str) -> dict[str, Any]:
        """Return the map under a name, with its overview where there is one."""
        small = {} if self.overview is None else {"overview": self.overview.tolist()}
        return {name: self.whole.tolist(), **small}


def maps(answer: FinishedAnswer, values: torch.Tensor) -> list[Map]:
    """Return values (..., patches of all images) as maps, image by image."""
    parts = values.split(answer.image_tokens.tolist(), -1)
    return [Map.of(*item) for item in zip(parts, answer.images, answer.tilings, strict=True)]


def attention_maps(answer: FinishedAnswer) -> list[Map]:
    """Return rho (layers, patches) of each image: mean attention over heads and rows (IVM paper, section 3)."""
    attention: Attention = answer.taken[NAME]
    return maps(answer, attention.patches / sum(attention.rows))


def judged_maps(answer: FinishedAnswer) -> list[Map]:
    """Return the attention maps with sinks discounted where that was requested."""
    all_maps = attention_maps(answer)
    return [map_.without(answer.context.sinks) for map_ in all_maps] if answer.options[DISCOUNT_SINKS] else all_maps
