"""Words for the tokens of a prompt and its answer that an intervention touches, and the classes of prompt tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from steering.prompt.spans import FIRST_IMAGE

TEXT, IMAGE = 0, 1
"""Classes of prompt tokens that can be touched separately.

Where images are told apart, the first is IMAGE, the second the next number, and so on.
"""

TOKENS = ("all", "prompt", "generated", "image", "text")
"""Words for tokens; "image" and "text" are the image and the other tokens of the prompt.

Besides these, "image:2" is the second image of the prompt alone.
"""
PATTERN = f"^({'|'.join(TOKENS)}|image:[1-9][0-9]{{0,3}})$"
"""A regular expression for each of these words."""
ALLOWED = f"one of {', '.join(TOKENS)}, or image:1, image:2 and so on for one image"
"""The same words for error messages."""

_ONE_IMAGE = re.compile(r"image:([1-9][0-9]{0,3})")


@dataclass(frozen=True)
class TokenChoice:
    """The tokens that a word stands for; raises ValueError where it is no such word."""

    word: str

    def __post_init__(self) -> None:
        if not isinstance(self.word, str) or (self.word not in TOKENS and self.image is None):
            raise ValueError(f"must be {ALLOWED}")

    @property
    def image(self) -> int | None:
        """The number of the one image that is touched, counted from 1; None for the other choices."""
        match = _ONE_IMAGE.fullmatch(self.word)
        return int(match[1]) if match else None

    @property
    def generated(self) -> bool:
        """True where generated tokens are touched."""
        return self.word in ("all", "generated")

    def classes(self, count: int) -> torch.Tensor:
        """Return 1 for each class of prompt tokens (see `prompt_classes`) that is touched, (count,) float32."""
        out = torch.zeros(count)
        if self.image is not None and self.image < count:  # a twin's prompt may lack the images
            out[self.image] = 1.0
        if self.word in ("all", "prompt", "text"):
            out[TEXT] = 1.0
        if self.word in ("all", "prompt", "image"):
            out[IMAGE:] = 1.0
        return out

    def touched(self, spans: torch.Tensor) -> torch.Tensor:
        """Return 1 for each prompt token of these spans (n,) that is touched, (n,) float32."""
        count = class_count([self], max(0, int(spans.max()) - FIRST_IMAGE + 1) if len(spans) else 0)
        return prompt_classes(spans, count) @ self.classes(count)


def class_count(choices: Iterable[TokenChoice], images: int) -> int:
    """Return the number of classes of tokens in prompts with up to `images` images.

    They are the text and the images, which are separate only where a choice names one of them.
    """
    return max(1 + images if any(choice.image is not None for choice in choices) else 2, 2)


def prompt_classes(spans: torch.Tensor, count: int) -> torch.Tensor:
    """Return the classes (n, count), float32 one-hot: TEXT, then image by image, or all images as one where count is 2."""
    numbers = (spans - FIRST_IMAGE + 1).clamp(TEXT, count - 1)
    return (numbers[:, None] == torch.arange(count)).float()
