"""Sums of attention by span: the spans beside a prompt's own, the shares of its sources, and the numbers of one step."""

from __future__ import annotations

import torch

from steering.prompt.spans import CONTEXT, FIRST_IMAGE
from steering.protocol.signals import Signal, StepGauge

BEFORE, AFTER = -2, -1
"""Places, after those of the images, of the sums over the prompt's system and user part, as a request divides it."""
GAUGES = {
    "attention_ratio": StepGauge(
        "The image's share of the mean attention to a token of the image and of the text context, of one token's row",
        Signal.STEPS, low=0.0, high=1.0, rises="vision", needs=("image", "context"),
    ),
    "image_share": StepGauge(
        "The images' share of all attention of one token's row",
        Signal.STEPS, low=0.0, high=1.0, rises="vision", needs=("image",),
    ),
}  # fmt: skip
"""The numbers of `step_numbers`, which are those of the readout `modality` for one row."""


def span_count(images: int) -> int:
    """Return the number of spans of a prompt with `images` images, `BEFORE` and `AFTER` included."""
    return FIRST_IMAGE + images - BEFORE


def image_sums(sums: torch.Tensor) -> torch.Tensor:
    """Return the images' part (..., images) of sums (..., spans)."""
    return sums[..., FIRST_IMAGE:BEFORE]


def span_sources(spans: int) -> torch.Tensor:
    """Return (spans, 3): 1 where a span is part of vision, of system and of user text."""
    sources = torch.zeros(spans, 3)
    sources[FIRST_IMAGE:BEFORE, 0] = 1.0
    sources[BEFORE, 1] = sources[AFTER, 2] = 1.0
    return sources


def source_shares(sums: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Return the shares of vision, system and user text, (..., layers, 3), normalised over the three.

    NaN where a layer's window holds none of them. sums: (..., layers, spans). sources: (..., spans, 3). Attention by span
    and step (SPD-Faith Bench paper, section 4.2).
    """
    parts = (sums[..., None] * sources[..., None, :, :]).sum(-2)  # a matrix product would take longer for so few terms
    return parts / parts.sum(-1, keepdim=True)


def step_numbers(sums: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the number of each of `GAUGES` for one row of attention of each sequence, (rows,), NaN where it has none.

    sums: (rows, layers, spans). tokens: (rows, spans), the tokens of each span.
    """
    by_span = sums.sum(1)
    images, image_tokens = image_sums(by_span).sum(-1), image_sums(tokens).sum(-1)
    image, context = images / image_tokens, by_span[:, CONTEXT] / tokens[:, CONTEXT]
    share = torch.where(image_tokens > 0, images / sums.shape[1], torch.nan)
    return {"attention_ratio": image / (image + context), "image_share": share}
