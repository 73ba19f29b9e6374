"""Attention sinks: places of an image that attract attention whatever the picture and the question, often its border.

They are measured once per model (`helmsight probe --calibrate-sinks`): by layer, how many times the average patch's
attention a place gets, mean over calibration prompts. Discounting divides a patch's attention by that, where it is more
than once; it never raises any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F


def attraction(maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """(layers, rows, columns) on the most frequent grid. maps: (layers, rows, columns) each, attention of one image's
    patches; a layer that does not see an image does not count."""
    rows, columns = Counter(tuple(map_.shape[1:]) for map_ in maps).most_common(1)[0][0]
    relative = torch.stack([_resized(map_ / map_.mean((1, 2), keepdim=True), rows, columns) for map_ in maps])
    return relative.nanmean(0).nan_to_num(1.0)


def discounted(rho: torch.Tensor, sinks: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """rho (layers, patches) of an image with a grid, its sinks discounted. sinks: (layers, rows, columns)."""
    return rho / _resized(sinks, *grid).clamp(min=1.0).flatten(1)


def _resized(map_: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return F.interpolate(map_[None], (rows, columns), mode="bilinear", antialias=True)[0]
