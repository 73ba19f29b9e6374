"""How attention divides between the images and the text context (modality-preference paper, section 4.2)."""

from __future__ import annotations

import math

import torch

from steering.diagnostics.numbers import known


def modality(
    image_sums: torch.Tensor, context_sums: torch.Tensor, image_tokens: int, context_tokens: int
) -> dict[str, object]:
    """The `modality` readout: mean attention to an image token / (that + mean attention to a context token).

    image_sums, context_sums: (layers,), attention summed over the same query rows and the modality's tokens. The overall
    ratio is that of the means over all layers. None without image or context tokens, and where a layer's window holds none.
    """
    if not image_tokens or not context_tokens:
        return {"attention_ratio": None, "by_layer": None}
    image, context = image_sums / image_tokens, context_sums / context_tokens
    by_layer = known(image / (image + context))
    overall = float(image.sum() / (image.sum() + context.sum()))
    return {"attention_ratio": None if math.isnan(overall) else overall, "by_layer": by_layer}
