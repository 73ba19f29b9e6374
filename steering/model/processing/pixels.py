"""Sizes of pictures, for processors that keep their shapes and bound their pixels, as Qwen-VL's and GLM's do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

try:
    from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
except ImportError:  # without torchvision
    Glm4vImageProcessor, Qwen2VLImageProcessor = Glm4vImageProcessorPil, Qwen2VLImageProcessorPil


def picture() -> Image.Image:
    """Return a small picture that every processor takes."""
    return Image.linear_gradient("L").resize((112, 84)).convert("RGB")


@dataclass(frozen=True)
class PixelBounds:
    """The bounds to which a processor resizes pictures.

    Sides become multiples of `factor`, and the area `least` to `most` pixels: one token for each factor x factor of them.
    The processor counts each pixel `frames` times. resample: its filter.
    """

    factor: int
    least: int
    most: int
    frames: int = 1
    resample: Image.Resampling = Image.Resampling.BICUBIC

    @classmethod
    def of(cls, processor: Any) -> PixelBounds | None:
        """Return the bounds of a model's processor; None where it has none."""
        images = getattr(processor, "image_processor", None)
        if isinstance(images, Glm4vImageProcessorPil | Glm4vImageProcessor):
            frames = images.temporal_patch_size
        elif isinstance(images, Qwen2VLImageProcessorPil | Qwen2VLImageProcessor):
            frames = 1
        else:
            return None
        least, most = images.size["shortest_edge"], images.size["longest_edge"]
        # A processor that does not resize may have none; transformers takes its default for what is none of Pillow's.
        filter_used = Image.Resampling(
            images.resample if isinstance(images.resample, int) else Image.Resampling.BILINEAR
        )
        return cls(images.patch_size * images.merge_size, -(-least // frames), most // frames, frames, filter_used)

    def sized(self, picture: Image.Image, least: int | None, most: int | None) -> Image.Image:
        """Return the picture resized as by a processor with these bounds, its own in place of None.

        Raises ValueError as the processor does.
        """
        picture = picture if picture.mode == "RGB" else picture.convert("RGB")
        size = self.size(picture, least, most)
        return picture if picture.size == size else picture.resize(size, self.resample)

    def size(self, picture: Image.Image, least: int | None, most: int | None) -> tuple[int, int]:
        """Return the width and height of the resized picture; raise ValueError as the processor does."""
        low, high = self.within(least, most)
        height, width = picture.height, picture.width
        if self.frames > 1 and min(height, width) < self.factor:  # GLM's processor enlarges such pictures first
            scale = max(self.factor / height, self.factor / width)
            height, width = int(height * scale), int(width * scale)
        height, width = smart_resize(height, width, self.factor, low, high)
        return width, height

    def tokens(self, picture: Image.Image, least: int | None, most: int | None) -> int:
        """Return the number of tokens of the resized picture."""
        width, height = self.size(picture, least, most)
        return width * height // self.factor**2

    def within(self, least: int | None, most: int | None) -> tuple[int, int]:
        """Return both bounds, each as given or its default; a given one overrides the default of the other."""
        if least is None:
            high = self.most if most is None else most
            return min(self.least, high), high
        return least, max(self.most, least) if most is None else most

    def taking(self, pictures: list[Image.Image]) -> dict[str, int]:
        """Return the processor's `size` with which it leaves these pictures as they are."""
        areas = [picture.width * picture.height for picture in pictures]
        least, most = min(self.least, *areas), max(self.most, *areas)
        return {"shortest_edge": least * self.frames, "longest_edge": most * self.frames}


def coordinates(size: tuple[int, int]) -> Image.Image:
    """Return a picture whose red rises from left to right and whose green from top to bottom."""
    width, height = size
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width).round()[None]
    pixels[..., 1] = np.linspace(0, 255, height).round()[:, None]
    return Image.fromarray(pixels)
