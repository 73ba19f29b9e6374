"""Which of the images before it the last image looked at (IVM paper, section 3)."""

from __future__ import annotations

from typing import Any

from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.readout import Diagnose, FinishedAnswer, Readout
from steering.protocol.signals import Signal
from steering.readouts.focus import image_attention_factor, m_lnd
from steering.recorders.attention import NAME, Attention


class AnchorReadout(Readout):
    """The image-attention factor between images: the last image's rows, the images before it."""

    name = "anchor"

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.ANCHOR})

    def read(self, answer: FinishedAnswer) -> dict[str, Any] | None:
        before = len(answer.images) - 1
        if before < 1:
            return None
        taken: Attention = answer.taken[NAME]
        sums, tokens = taken.anchor[:, FIRST_IMAGE : FIRST_IMAGE + before], answer.image_tokens
        sigma = image_attention_factor(sums, int(tokens[-1]), tokens[:before])
        image = m_lnd(sigma[-answer.around.focus_layers :])
        return {"sigma": sigma.tolist(), "image": None if image is None else image + 1}
