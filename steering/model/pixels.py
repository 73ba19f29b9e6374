"""How large the processor makes pictures, where it keeps their shapes and bounds their pixels, as Qwen-VL's does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

try:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
except ImportError:  # without torchvision
    Qwen2VLImageProcessor = Qwen2VLImageProcessorPil


def picture() -> Image.Image:
    """A small picture that every processor takes."""
    return Image.linear_gradient("L").resize((112, 84)).convert("RGB")


@dataclass(frozen=True)
class PixelBounds:
    """A picture is brought to sides that are multiples of `factor`, and to `least` to `most` pixels: one token for each
    factor x factor of them."""

    factor: int
    least: int
    most: int

    @classmethod
    def of(cls, processor: Any) -> PixelBounds | None:
        """Those of a model's processor; None where it has none."""
        found = getattr(processor, "image_processor", None)
        if not isinstance(found, Qwen2VLImageProcessorPil | Qwen2VLImageProcessor):
            return None
        return cls(found.patch_size * found.merge_size, found.size["shortest_edge"], found.size["longest_edge"])

    def sized(self, picture: Image.Image, least: int | None, most: int | None) -> Image.Image:
        """The picture as the processor would make it if these were its bounds, its own where one is None; raises ValueError
        as the processor does."""
        return picture.resize(self.size(picture, least, most), Image.Resampling.BICUBIC)

    def size(self, picture: Image.Image, least: int | None, most: int | None) -> tuple[int, int]:
        """The width and height of that picture; raises ValueError as the processor does."""
        low, high = self.within(least, most)
        height, width = smart_resize(picture.height, picture.width, self.factor, low, high)
        return width, height

    def tokens(self, picture: Image.Image, least: int | None, most: int | None) -> int:
        """How many tokens it has."""
        width, height = self.size(picture, least, most)
        return width * height // self.factor**2

    def within(self, least: int | None, most: int | None) -> tuple[int, int]:
        """Both bounds of a picture of which one may be stated, and goes before the other."""
        if least is None:
            high = self.most if most is None else most
            return min(self.least, high), high
        return least, max(self.most, least) if most is None else most

    def taking(self, pictures: list[Image.Image]) -> dict[str, int]:
        """The processor's `size` with which it leaves these pictures as they are."""
        areas = [picture.width * picture.height for picture in pictures]
        return {"shortest_edge": min(self.least, *areas), "longest_edge": max(self.most, *areas)}
