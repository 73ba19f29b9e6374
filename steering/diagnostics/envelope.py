"""The versioned envelope of readouts beside an answer; None (null) where a value does not exist."""

from __future__ import annotations

import math
from typing import Any

import torch

from steering.diagnostics.focus import focus, image_attention_factor
from steering.diagnostics.modality import modality
from steering.sequence import Sequence
from steering.spans import CONTEXT, FIRST_IMAGE, QUESTION

VERSION = 1


def envelope(sequence: Sequence, focus_layers: int) -> dict[str, Any] | None:
    """The diagnostics of a finished sequence, None when none were asked for; `focus_layers` is N of the focus metrics."""
    readings, options, layout = sequence.readings, sequence.diagnose, sequence.prompt.layout
    if readings is None or options is None:
        return None
    rows = {"question": layout.count(QUESTION), "output": readings.output_rows}
    sums = readings.question + readings.output  # (layers, spans)
    images = len(layout.images)
    tokens = torch.tensor([image.tokens for image in layout.images])
    image_sums = sums[:, FIRST_IMAGE : FIRST_IMAGE + images]
    total = rows["question"] + rows["output"]
    out: dict[str, Any] = {
        "version": VERSION,
        "images": [
            {"image": number, "tokens": image.tokens, "grid": list(image.grid) if image.grid else None}
            for number, image in enumerate(layout.images, start=1)
        ],
        "rows": rows,
    }
    if "focus" in options.include:
        out["focus"] = None
        if images and total:
            sigma = image_attention_factor(image_sums, total, tokens)
            out["focus"] = focus(sigma, focus_layers, options.target_image)
    if "modality" in options.include:
        out["modality"] = modality(image_sums.sum(1), sums[:, CONTEXT], int(tokens.sum()), layout.count(CONTEXT))
    if "decay" in options.include:
        shares = zip(("vision", "system", "user"), readings.decay.T.tolist(), strict=True)
        out["decay"] = {name: [None if math.isnan(x) else x for x in values] for name, values in shares}
    return out
