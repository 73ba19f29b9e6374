"""The files that distinguish one family's checkpoint folder from another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """The contents that distinguish one family's checkpoint folder from another's."""

    config: Json  # config.json; ids of special tokens are written as the tokens
    image_processor: Json  # preprocessor_config.json
    template: str  # chat_template.jinja
    specials: tuple[str, ...]  # besides bos, eos and pad
    eos: str
    pad: str
    bos: str | None = None
    adds_bos: bool = True  # the tokenizer itself puts bos first
    processor: Json = field(default_factory=dict)  # processor_config.json
    video_processor: Json = field(default_factory=dict)  # video_preprocessor_config.json
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # what the processor reads off the tokenizer by name
    word_std: float = 0.5  # spread of the word embeddings
    final_norm: float | None = None  # weight of the last norm, where not as initialised
    max_images: int | None = None
