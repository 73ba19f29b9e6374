"""PAI: attention to images is amplified, and the logits are contrasted with those of the text alone.

Liu et al. 2024, "Paying More Attention to Image", sections 3.2 and 3.3. Scores s of image tokens become s + amplify * |s|
before the softmax, in the rows of all generated tokens. In the prompt's last row the paper has it too, and the authors'
code (github.com/LALBJ/PAI: attention.py, CFG.py) only where nothing is contrasted, because its flag for the passes of the
text is still set in the first pass.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Literal

import torch
from pydantic import Field

from steering.decoder.hooks import AttentionHook
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.interventions.contrast import WeightedContrast, text_alone
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.intervention_spec import LAYERS, Messages, Rule
from steering.protocol.sequence import Sequence
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.protocol.wording import shown


class Pai(WeightedContrast):
    """Contrast the logits with those of the text alone and amplify attention to images (PAI).

    From layer `first_layer` to `last_layer`, by default the last one, scores s of image tokens become s + `amplify` * |s|.
    The paper's gamma is 1 + alpha and has the paper's default; the other defaults are the released code's (Liu et al. 2024,
    sections 3.2 and 3.3). There, alpha 0 cuts no tokens off, and with a contrast the prompt's pass, and with it the first
    token, is not amplified; `first_token` "amplified" does so always. Raises RequestError for values out of range.
    """

    kind = "pai"
    needs_image = True

    alpha: float = Field(0.1, ge=0, le=10)
    amplify: float = Field(0.2, ge=0, le=10)
    first_layer: int = Field(2, ge=0, json_schema_extra={LAYERS: -1})
    last_layer: int | None = Field(None, ge=0, json_schema_extra={LAYERS: -1})
    first_token: Literal["released", "amplified"] = "released"

    @property
    def rule(self) -> Rule:
        return super().rule if self.alpha else Rule(0.0)

    @property
    def amplifies_prompt(self) -> bool:
        """True where the prompt's last row is amplified."""
        return self.first_token == "amplified" or not self.alpha

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        for name, layer in (("first_layer", self.first_layer), ("last_layer", self.last_layer)):
            if layer is not None and layer >= mllm.num_layers:
                raise RequestError(
                    f"'contrast.{name}' must be below {mllm.num_layers}, the model's layers; got {shown(layer)}.",
                    param=f"contrast.{name}",
                )
        if self.last_layer is not None and self.last_layer < self.first_layer:
            raise RequestError(
                f"'contrast.last_layer' must be at least {self.first_layer}, the first layer; got {shown(self.last_layer)}.",
                param="contrast.last_layer",
            )

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        return text_alone(mllm, messages, prompt, self.kind)


class AmplifyRows(AttentionHook):
    """The amplification of one forward pass.

    asked: (rows,) bool, the rows that are amplified. alpha: (rows, layers), 0 in others. images: (rows, length), 1 on the
    columns of images. last: (rows,) the query that is amplified in a prefill, -1 where there is none.
    """

    def __init__(
        self, asked: torch.Tensor, alpha: torch.Tensor, images: torch.Tensor, last: torch.Tensor | None = None
    ):
        self.asked = asked[:, None, None, None]
        self.alpha = alpha
        self.images = images
        self.queries = None if last is None else last[:, None]

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        gain = self.gains(layer, scores.shape[-1])[:, None, None]
        if queries is not None and self.queries is not None:
            gain = gain * (queries == self.queries)[:, None, :, None]
        return torch.addcmul(scores, gain.to(scores.device), scores.abs())

    def gains(self, layer: int, columns: int) -> torch.Tensor:
        """Return the gains (rows, columns) with which the scores s of amplified rows become s + gain * |s|."""
        return self.alpha[:, layer, None] * self.images[:, :columns]


class PaiSlots(Slots):
    """The amplification of every slot.

    asked: (slots,) bool. alpha: (slots, layers), 0 where nothing was requested. images: (slots, length), 1 on the columns of
    images.
    """

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self.asked = torch.zeros(pool.slots, dtype=torch.bool, device=pool.device)
        self.alpha = torch.zeros(pool.slots, pool.layers, device=pool.device)
        self.images = torch.zeros(pool.slots, pool.length, device=pool.device)

    def place(self, sequence: Sequence) -> None:
        slot, pai = sequence.slot, sequence.spec.contrast
        fill_slot(self.asked, slot, isinstance(pai, Pai) and pai.amplify > 0)
        self.alpha[slot] = 0
        self.images[slot] = 0
        if isinstance(pai, Pai):
            spans = sequence.prompt.layout.spans
            end = self.pool.layers if pai.last_layer is None else pai.last_layer + 1
            self.alpha[slot, pai.first_layer : end] = pai.amplify
            self.images[slot, : len(spans)] = to_device(spans >= FIRST_IMAGE, self.images)

    def prefill(self, chunk: PrefillChunk) -> AmplifyRows | None:
        scaled = torch.tensor(
            [
                isinstance(pai := sequence.spec.contrast, Pai) and (pai.amplifies_prompt or chunk.replay)
                for sequence in chunk.sequences
            ]
        )
        if not (chunk.complete or chunk.replay) or not bool(scaled.any()):
            return None
        last = torch.where(scaled, chunk.last, -1)
        rows = chunk.rows
        return AmplifyRows(self.asked[rows], self.alpha[rows], self.images[rows], to_device(last, self.alpha.device))

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length, generated=False)  # in a prompt only the last row is amplified

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(_uses_pai(sequences))

    def decode(self, batch: DecodeBatch) -> AmplifyRows:
        return AmplifyRows(self.asked[batch.rows], self.alpha[batch.rows], self.images[batch.rows])


def _uses_pai(sequences: Rows[Sequence]) -> list[bool]:
    return [isinstance(sequence.spec.contrast, Pai) for sequence in sequences]
