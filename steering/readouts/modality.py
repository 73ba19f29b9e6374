"""The modality readout: how attention divides between images and text context (modality-preference paper, section 4.2)."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from steering.measures import known
from steering.prompt.spans import CONTEXT, FIRST_IMAGE
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, Scalar
from steering.protocol.signals import Signal
from steering.recorders.attention import NAME, Attention


def modality(
    image_sums: torch.Tensor, context_sums: torch.Tensor, image_tokens: int, context_tokens: int
) -> dict[str, object]:
    """Return the `modality` readout: mean attention to an image token / (that + mean attention to a context token).

    image_sums, context_sums: (layers,), attention summed over the same query rows and the modality's tokens. The overall
    ratio is that of the means over all layers. None without image or context tokens, and where a layer's window holds none.
    """
    if not image_tokens or not context_tokens:
        return {"attention_ratio": None, "by_layer": None}
    image, context = image_sums / image_tokens, context_sums / context_tokens
    by_layer = known(image / (image + context))
    overall = float(image.sum() / (image.sum() + context.sum()))
    return {"attention_ratio": None if math.isnan(overall) else overall, "by_layer": by_layer}


class ModalityReadout(Readout):
    """The mean attention to an image token, as a share of its sum with that to a text context token."""

    name = "modality"
    cheap = True
    scalars: ClassVar[dict[str, type]] = {"attention_ratio": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "attention_ratio": Quantity(
            "The image's share of the mean attention to a token of the image and of the text context",
            low=0.0, high=1.0, buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.SPANS})

    def read(self, answer: FinishedAnswer) -> dict[str, object]:
        taken: Attention = answer.taken[NAME]
        images = taken.modality[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)].sum(1)
        tokens = int(answer.image_tokens.sum())
        ratio = modality(images, taken.modality[:, CONTEXT], tokens, answer.layout.count(CONTEXT))
        return ratio | {"rows": taken.modality_rows._asdict()}

    def summary(self, said: Any) -> dict[str, Scalar]:
        return {"attention_ratio": said["attention_ratio"]}
