"""Pairs of pictures and their differences, shown apart or as one, whole or partly hidden."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageChops, ImageStat

from probes.harness.pictures import Source, picture
from probes.image_pairs.metrics import Claim

Difficulty = Literal["easy", "medium", "hard", "unrated"]
DIFFICULTIES: tuple[Difficulty, ...] = ("easy", "medium", "hard", "unrated")
BLOCKS = 12
"""The number of blocks along either side of a picture, some of which are hidden."""
GRAY = (128, 128, 128)


@dataclass(frozen=True)
class PicturePair:
    """Two pictures with the differences `true`.

    `first` and `second` are the original and the changed one, or `merged` holds both, the original above or to the left.
    `difficulty` is that of a pair of the single-difference set, None in the other.
    """

    id: str
    true: tuple[Claim, ...]
    first: Source | None = None
    second: Source | None = None
    merged: Source | None = None
    difficulty: Difficulty | None = None

    @property
    def setting(self) -> str:
        """The difficulty of a single difference; for several their number."""
        return self.difficulty or str(len(self.true))

    def pictures(self, *, merged: bool = False, hidden: float = 0.0) -> list[Image.Image]:
        """Return both pictures, or one that holds both.

        `hidden` is the share of their blocks that is gray: the same blocks in both, so that the hiding itself makes no
        difference. Raises ValueError if a file does not decode.
        """
        if self.first is None or self.second is None:
            assert self.merged is not None
            merged_image = picture(self.merged, f"the pair {self.id}")
            if merged and not hidden:
                return [merged_image]
            pictures = apart(merged_image)
        else:
            pictures = [picture(path, f"the pair {self.id}") for path in (self.first, self.second)]
        if hidden:
            pictures = [_hide(image, hidden, f"{self.id} {hidden:g}") for image in pictures]
        return [stacked(pictures)] if merged else pictures


def apart(merged: Image.Image) -> list[Image.Image]:
    """Return the halves of a picture that holds two: above and below, or left and right, whichever are more alike.

    The benchmark stacks landscapes and puts upright pictures side by side.
    """
    width, height = merged.size
    rows = [merged.crop((0, 0, width, height // 2)), merged.crop((0, height - height // 2, width, height))]
    columns = [merged.crop((0, 0, width // 2, height)), merged.crop((width - width // 2, 0, width, height))]
    return min(rows, columns, key=_distance)


def _distance(halves: Sequence[Image.Image]) -> float:
    """Return the mean absolute difference of pixel values."""
    small = [half.convert("L").resize((64, 64)) for half in halves]
    return ImageStat.Stat(ImageChops.difference(*small)).mean[0]


def stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return a picture with the first above the second."""
    first, second = (image.convert("RGB") for image in pictures)
    canvas = Image.new("RGB", (max(first.width, second.width), first.height + second.height))
    canvas.paste(first, (0, 0))
    canvas.paste(second, (0, first.height))
    return canvas


def _hide(image: Image.Image, share: float, seed: str) -> Image.Image:
    """Return the picture with a share of its `BLOCKS` x `BLOCKS` blocks gray."""
    blocks = [(row, column) for row in range(BLOCKS) for column in range(BLOCKS)]
    covered = image.convert("RGB")
    edges = [[round(side * i / BLOCKS) for i in range(BLOCKS + 1)] for side in image.size]
    for row, column in random.Random(seed).sample(blocks, round(share * len(blocks))):
        box = (edges[0][column], edges[1][row], edges[0][column + 1], edges[1][row + 1])
        covered.paste(GRAY, box)
    return covered
