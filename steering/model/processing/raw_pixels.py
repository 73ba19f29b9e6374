"""Keep pictures as raw pixels, a byte for each colour; a table turns them into a processor's on the model's device.

A picture of 1,500 tokens of Qwen-VL has 29 MB of float32 pixels, as each patch is repeated for two frames, and 3.6 MB of raw
ones. These are what is hashed, cached, sent to the engine's process and copied to a GPU.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from steering.model.images import PIXELS, Picture, PixelTable
from steering.model.processing.pixels import PixelBounds
from steering.vision.geometry import GRID

CHANNELS, LEVELS = 3, 256
ARGUMENTS = frozenset({"size", "return_tensors"})
"""The arguments of a processor's call under which it has the table of its defaults."""

log = logging.getLogger(__name__)


class RawPixels:
    """Makes pictures of raw pixels for a processor that cuts pictures into patches, as those of Qwen-VL and GLM do.

    plain: the own call of the processor's image processor, from which the table is learnt. It is used only where raw pixels
    then become exactly the processor's, with resizing and without.
    """

    def __init__(self, processor: Any, plain: Any):
        self._images, self._plain = processor.image_processor, plain
        self._bounds = PixelBounds.of(processor)

    def picture(self, image: Image.Image, arguments: Mapping[str, Any]) -> Picture | None:
        """Return an RGB picture; None where the processor has to be asked.

        Raises ValueError as the processor does.
        """
        if not arguments.keys() <= ARGUMENTS or self._table is None:
            return None
        bounds = {"size": arguments["size"]} if "size" in arguments else {}
        return Picture.of(self._raw(image, **bounds), self._table)

    def _raw(self, image: Image.Image, **bounds: Any) -> dict[str, torch.Tensor]:
        """Return a picture's raw pixels (patches, channels, n), and its grid."""
        if isinstance(self._images, Qwen2VLImageProcessorPil):
            return self._cut(image, **bounds)
        given = {**bounds, "do_rescale": False, "do_normalize": False, "return_tensors": "pt"}
        made = self._plain(self._images, [image], **given)
        frames = made[PIXELS].unflatten(1, (CHANNELS, self._images.temporal_patch_size, -1))
        return {PIXELS: frames[:, :, 0].to(torch.uint8), GRID: made[GRID]}

    def _cut(self, image: Image.Image, size: Mapping[str, int] | None = None) -> dict[str, torch.Tensor]:
        """Return the same without the float32 pixels that the processor would make on the way."""
        assert self._bounds is not None
        least, most = ((size or self._images.size)[edge] for edge in ("shortest_edge", "longest_edge"))
        image = self._bounds.sized(image, least, most)
        patch, merge = self._images.patch_size, self._images.merge_size
        rows, columns = image.height // patch, image.width // patch
        pixels = np.asarray(image).reshape(rows // merge, merge, patch, columns // merge, merge, patch, CHANNELS)
        patches = pixels.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, CHANNELS, patch * patch)
        return {
            PIXELS: torch.from_numpy(np.require(patches, requirements=("C", "W"))),
            GRID: torch.tensor([[1, rows, columns]]),
        }

    @functools.cached_property
    def _table(self) -> PixelTable | None:
        """The processor's table; None where it has none."""
        try:
            table = self._learnt()
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            log.debug("the processor's pixels are no table of raw ones", exc_info=error)
            return None
        return table

    def _learnt(self) -> PixelTable | None:
        """Return the processor's table, of a picture with every level; raise any error for another kind of processor."""
        if self._bounds is None:
            return None
        frames, factor = self._images.temporal_patch_size, self._bounds.factor
        side = factor * math.ceil(LEVELS**0.5 / factor)
        draw = np.random.default_rng(0)
        levels = draw.permuted(np.resize(np.arange(LEVELS, dtype=np.uint8), (CHANNELS, side * side)), axis=1)
        whole = Image.fromarray(np.ascontiguousarray(levels.T).reshape(side, side, CHANNELS))
        noise = Image.fromarray(draw.integers(0, LEVELS, (side + 5, 2 * side + 3, CHANNELS), dtype=np.uint8))
        as_it_is = {"size": self._bounds.taking([whole])}
        raw, processed = self._raw(whole, **as_it_is)[PIXELS], self._processed(whole, **as_it_is)[PIXELS]
        values = torch.full((CHANNELS, LEVELS), torch.nan)
        for channel, pixels in enumerate(processed.unflatten(1, (CHANNELS, frames, -1))[:, :, 0].unbind(1)):
            values[channel, raw[:, channel].flatten().long()] = pixels.flatten()
        table = PixelTable(values, frames)
        exact = self._equal(whole, table, **as_it_is) and self._equal(noise, table)
        return table if exact and not values.isnan().any() else None

    def _equal(self, image: Image.Image, table: PixelTable, **bounds: Any) -> bool:
        """Return True where raw pixels become the processor's for a picture."""
        ours, theirs = Picture.of(self._raw(image, **bounds), table), self._processed(image, **bounds)
        same_names = ours.tensors.keys() == theirs.keys()
        return same_names and all(torch.equal(ours.read(name), value) for name, value in theirs.items())

    def _processed(self, image: Image.Image, **bounds: Any) -> dict[str, torch.Tensor]:
        return dict(self._plain(self._images, [image], return_tensors="pt", **bounds))
