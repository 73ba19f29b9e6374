"""Tiny random checkpoints of many model families: what the tests load instead of real ones.

`build` writes a complete folder (config, weights, tokenizer, chat template, processor, generation config) from scratch
and offline. The layout is that of the published checkpoints, so that the folders load through the Auto classes; special
tokens and chat templates follow the real ones, shortened, with the quirks that a server meets: some templates move the
images before the text, some write the bos token themselves, some trim the text or know only lists of parts.
"""

from tests.families.building import build, checkpoint
from tests.families.messages import example_image, example_messages, images_of
from tests.families.parts import HIDDEN, LAYERS
from tests.families.registry import IMAGE_ONLY, REFUSED, SUPPORTED, UNLIKE

FAMILIES: tuple[str, ...] = tuple(SUPPORTED)
ANSWERING: tuple[str, ...] = (*SUPPORTED, *UNLIKE)
UNSUPPORTED: tuple[str, ...] = tuple(REFUSED)

__all__ = [
    "ANSWERING",
    "FAMILIES",
    "HIDDEN",
    "IMAGE_ONLY",
    "LAYERS",
    "UNSUPPORTED",
    "build",
    "checkpoint",
    "example_image",
    "example_messages",
    "images_of",
]
