"""The places of a tiled image's tokens in the image.

Processors cut large images into tiles in various ways, and none documents how. A picture whose colours are its own
coordinates, however, comes out as tiles that reveal their places, so that no family needs code of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from PIL import Image

from steering.model.mllm import MLLM
from steering.model.processing.pixels import coordinates
from steering.model.processing.raw_pixels import CHANNELS
from steering.prompt.layout import ImageSpan, encode_picture


@dataclass(frozen=True)
class Tiling:
    """The order of a tiled image's tokens.

    `order` (rows * columns,) are the tokens row by row of the whole `grid` (rows, columns); `overview` those of the tile
    that shows the whole image in small, row by row of `overview_grid`, empty where there is none.
    """

    grid: tuple[int, int]
    order: torch.Tensor
    overview: torch.Tensor
    overview_grid: tuple[int, int]


def tiling_of(mllm: MLLM, picture: Image.Image, image: ImageSpan) -> Tiling | None:
    """Return the tiling of a picture whose tokens are known.

    None where they form one grid anyway, or where its tiles are no grids of tokens or do not make up the picture.
    """
    return None if image.grid is not None else _tiling(mllm, mllm.image_size or picture.size, image.tokens)


@functools.lru_cache(maxsize=1024)
def _tiling(mllm: MLLM, size: tuple[int, int], tokens: int) -> Tiling | None:
    encoded = encode_picture(mllm, coordinates(size))
    pixels = encoded["pixel_values"]
    if (sizes := encoded.get("spatial_shapes")) is not None:  # (tiles, patches, colours of a patch), padded
        tiles = [
            tile[: rows * columns].reshape(-1, CHANNELS).T
            for tile, (rows, columns) in zip(pixels, sizes.tolist(), strict=True)
        ]
        merge = round((int(sizes.prod(1).sum()) / tokens) ** 0.5)
        grids = [(rows // merge, columns // merge) for rows, columns in sizes.tolist()]
    elif pixels.ndim < 4:
        return None
    else:  # (tiles, channels, height, width)
        tiles = list(pixels.flatten(0, -4).flatten(2))
        grids = [(round((tokens / len(tiles)) ** 0.5),) * 2] * len(tiles)
    counts = [rows * columns for rows, columns in grids]
    if sizes is not None and (len(tiles) == 1 or sum(counts) != tokens):  # a small picture beside a tiled one
        return Tiling(grids[0], torch.arange(tokens), torch.arange(0), (0, 0)) if counts == [tokens] else None
    if len(tiles) < 2:
        return None
    if sum(counts) != tokens:
        config = mllm.model.config
        rate = Fraction(
            getattr(config, "downsample_rate", None) or 1
        )  # of the sides of a tile; some connectors have one
        overview = config.vision_config.image_size // config.vision_config.patch_size * rate
        return _with_row_ends(tokens, len(tiles) - 1, int(overview), size)
    numbers = [part.view(grid) for part, grid in zip(torch.arange(tokens).split(counts), grids, strict=True)]
    return _assembled(numbers, *_shown(tiles))


def _with_row_ends(tokens: int, tiles: int, side: int, size: tuple[int, int]) -> Tiling | None:
    """Return the tiling of an overview followed by the rows of all tiles together.

    Each row ends with a token of its own, and the margin's tokens are left out (LLaVA-NeXT, LLaVA-OneVision). Of the grids
    with that number of tokens that fit some arrangement of the tiles, it is the one whose aspect ratio is closest to the
    picture's.
    """
    remaining, aspect = tokens - side * side, size[0] / size[1]
    grids = [
        (rows, remaining // rows - 1)
        for rows in range(1, remaining + 1)
        if remaining % rows == 0 and remaining // rows > 1
    ]
    fitting = [
        (rows, columns)
        for rows, columns in grids
        for high in range(1, tiles + 1)
        if tiles % high == 0 and rows <= high * side and columns <= tiles // high * side
    ]
    if not fitting:
        return None
    rows, columns = min(fitting, key=lambda grid: abs(math.log(grid[1] / grid[0] / aspect)))
    order = side * side + torch.arange(rows)[:, None] * (columns + 1) + torch.arange(columns)
    return Tiling((rows, columns), order.flatten(), torch.arange(side * side), (side, side))


def _shown(tiles: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the extents and centres (k, 2) of tiles of a picture of coordinates, and whether a tile shows all of it (k,).

    The order is extents, whole, centres, along x and y. tiles: (channels, pixels) each.
    """
    places = [tile[:2].float() for tile in tiles]
    low, high = (torch.stack([bound(place, 1) for place in places]) for bound in (torch.amin, torch.amax))
    extents = high - low
    shows_all = (extents > 0.9 * (high.amax(0) - low.amin(0))).all(1)
    return extents, shows_all, torch.stack([place.mean(1) for place in places])


def _assembled(
    numbers: Sequence[torch.Tensor], extents: torch.Tensor, whole: torch.Tensor, centres: torch.Tensor
) -> Tiling | None:
    """Return the tiling of tiles with known places; None where they do not fill a grid.

    numbers: (rows, columns) of each tile's tokens. The others are as from `_shown`.
    """
    overviews = [tile for tile, shows_all in zip(numbers, whole, strict=True) if shows_all]
    parts = [tile for tile, shows_all in zip(numbers, whole, strict=True) if not shows_all]
    if len({tile.shape for tile in parts}) != 1 or len(overviews) > 1:
        return None
    extents, centres = extents[~whole], centres[~whole]
    column, columns = _ranks(centres[:, 0], extents[:, 0])
    row, rows = _ranks(centres[:, 1], extents[:, 1])
    place = row * columns + column
    if rows * columns != len(parts) or len(set(place.tolist())) != len(parts):
        return None
    high, wide = parts[0].shape
    by_place = torch.stack(parts)[place.argsort()].view(rows, columns, high, wide)
    order = by_place.permute(0, 2, 1, 3).reshape(-1)
    overview = overviews[0] if overviews else parts[0][:0]
    return Tiling((rows * high, columns * wide), order, overview.flatten(), (overview.shape[0], overview.shape[1]))


def _ranks(values: torch.Tensor, extents: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the rank of each value, where differences of a small part of a tile count as equal, and the number of ranks."""
    ordered = values.sort().values
    starts = torch.cat([torch.ones(1, dtype=torch.bool), ordered.diff() > 0.25 * extents.mean()])
    levels = ordered[starts]
    return (values[:, None] - levels).abs().argmin(1), len(levels)
