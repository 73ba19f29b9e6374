"""Pictures as raw pixels, a byte for each colour, of which a table makes a processor's float32 pixels where they are needed.

A picture of 1,500 tokens of Qwen-VL has 29 MB of float32 pixels, as each patch is repeated for two frames, and 3.6 MB of raw
ones. These are what is hashed, cached, sent to the engine's process and copied to a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from steering.model.images import PIXELS, Picture, PixelTable
from steering.vision.geometry import GRID

LEVELS = 256
ARGUMENTS = frozenset({"size", "return_tensors"})
"""The arguments of a processor's call under which it has the table of its defaults."""


class RawPixels:
    """Makes pictures of raw pixels for a processor like Qwen2-VL's.

    images: the image processor; plain: its own call. The table is learnt from that, and used only where raw pixels then
    become exactly the processor's, with resizing and without.
    """

    def __init__(self, images: Any, plain: Any):
        self._images, self._plain = images, plain

    def picture(self, image: Image.Image, arguments: Mapping[str, Any]) -> Picture | None:
        """Return an RGB picture; None where the processor has to be asked.

        Raises ValueError as the processor does.
        """
        if not arguments.keys() <= ARGUMENTS or self._table is None:
            return None
        return self._picture(image, self._table, arguments.get("size"))

    def _picture(self, image: Image.Image, table: PixelTable, bounds: Mapping[str, int] | None = None) -> Picture:
        patch, merge = self._images.patch_size, self._images.merge_size
        least, most = ((bounds or self._images.size)[edge] for edge in ("shortest_edge", "longest_edge"))
        height, width = smart_resize(image.height, image.width, patch * merge, least, most)
        if image.size != (width, height):
            image = image.resize((width, height), self._images.resample)
        rows, columns = height // patch, width // patch
        pixels = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, -1)
        patches = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, -1, patch * patch)
        return Picture.of({PIXELS: torch.from_numpy(patches), GRID: torch.tensor([[1, rows, columns]])}, table)

    @functools.cached_property
    def _table(self) -> PixelTable | None:
        """The processor's table; None where it has none."""
        images = self._images
        if not isinstance(images, Qwen2VLImageProcessorPil):
            return None
        factor = images.patch_size * images.merge_size
        side = factor * max(2, math.ceil(images.size["shortest_edge"] ** 0.5 / factor))
        draw = np.random.default_rng(0)
        levels = draw.permuted(np.resize(np.arange(LEVELS, dtype=np.uint8), (3, side * side)), axis=1)
        whole = Image.fromarray(np.ascontiguousarray(levels.T).reshape(side, side, 3))
        noise = Image.fromarray(draw.integers(0, LEVELS, (side + 5, 2 * side + 3, 3), dtype=np.uint8))
        raw = self._picture(whole, PixelTable(torch.zeros(3, LEVELS), images.temporal_patch_size))
        try:
            processed = self._processed(whole).view(len(raw.tensors[PIXELS]), 3, images.temporal_patch_size, -1)
        except (RuntimeError, ValueError):  # another shape, or bounds that no square satisfies
            return None
        values = torch.zeros(3, LEVELS)
        for channel in range(3):
            values[channel, raw.tensors[PIXELS][:, channel].flatten().long()] = processed[:, channel, 0].flatten()
        table = PixelTable(values, images.temporal_patch_size)
        exact = (
            torch.equal(self._picture(image, table).read(PIXELS), self._processed(image)) for image in (whole, noise)
        )
        return table if all(exact) else None

    def _processed(self, image: Image.Image) -> torch.Tensor:
        pixels: torch.Tensor = self._plain(self._images, [image], return_tensors="pt")[PIXELS]
        return pixels
