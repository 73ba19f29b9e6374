"""The modality readout: how attention divides between images and text context (modality-preference paper, section 4.2)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from steering.measures import nan_to_none
from steering.prompt.spans import CONTEXT, FIRST_IMAGE
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, Scalar
from steering.protocol.signals import Signal
from steering.recorders.attention import NAME, Attention

REASONS = NO_IMAGE, NO_CONTEXT, NEITHER, OUT_OF_WINDOW = ("no_image", "no_context", "neither", "out_of_window")
"""Reasons for which there is no ratio: the prompt lacks a modality, or every layer's window holds no token of either."""


def modality(
    image_sums: torch.Tensor, context_sums: torch.Tensor, image_tokens: int, context_tokens: int
) -> dict[str, object]:
    """Return the `modality` readout: mean attention to an image token / (that + mean attention to a context token).

    image_sums, context_sums: (layers,), attention summed over the same query rows and the modality's tokens. The overall
    ratio is that of the means over all layers. None without image or context tokens, and where a layer's window holds none;
    `reason` tells which of these holds for the overall ratio, by one of `REASONS`.
    """
    if not image_tokens or not context_tokens:
        missing = NEITHER if not image_tokens and not context_tokens else NO_CONTEXT if image_tokens else NO_IMAGE
        return {"attention_ratio": None, "by_layer": None, "reason": missing}
    image, context = image_sums / image_tokens, context_sums / context_tokens
    by_layer = nan_to_none(image / (image + context))
    overall = float(image.sum() / (image.sum() + context.sum()))
    if math.isnan(overall):
        return {"attention_ratio": None, "by_layer": by_layer, "reason": OUT_OF_WINDOW}
    return {"attention_ratio": overall, "by_layer": by_layer, "reason": None}


def share(sums: torch.Tensor, rows: int, tokens: int) -> float | None:
    """Return the share of all attention that goes to a modality's tokens, mean over layers and rows; None without tokens.

    sums: (layers,), attention summed over `rows` query rows and the tokens.
    """
    return float(sums.mean()) / rows if tokens else None


class ModalityReadout(Readout):
    """The attention to images: its share of all attention, and its ratio to that of the text context, token by token."""

    name = "modality"
    cheap = True
    scalars: ClassVar[dict[str, type]] = {"attention_ratio": float, "image_share": float, "context_share": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "attention_ratio": Quantity(
            "The image's share of the mean attention to a token of the image and of the text context",
            low=0.0, high=1.0, buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        ),
        "image_share": Quantity(
            "The images' share of all attention of the question and the answer",
            low=0.0, high=1.0, buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0),
        ),
        "context_share": Quantity(
            "The text context's share of all attention of the question and the answer",
            low=0.0, high=1.0, buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.SPANS})

    def read(self, answer: FinishedAnswer) -> dict[str, object]:
        attention: Attention = answer.taken[NAME]
        images = attention.modality[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)].sum(1)
        context, rows = attention.modality[:, CONTEXT], sum(attention.modality_rows)
        tokens, context_tokens = int(answer.image_tokens.sum()), answer.layout.count(CONTEXT)
        return {
            **modality(images, context, tokens, context_tokens),
            "image_share": share(images, rows, tokens),
            "context_share": share(context, rows, context_tokens),
            "rows": attention.modality_rows._asdict(),
        }

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {name: report[name] for name in self.scalars}
