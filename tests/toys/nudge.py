"""A toy intervention: a constant is added to the logit of one token, at every step."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import Options
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Pool, Slots
from steering.protocol.wording import shown


class Nudge(Options):
    """One token becomes likelier, or less likely. `token` is its number in the vocabulary; `by` is added to its logit."""

    path = ("nudge",)

    token: int = Field(ge=0)
    by: float = Field(1.0, ge=-100, le=100)

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        if self.token >= mllm.vocab_size:
            raise RequestError(
                f"'nudge.token' must be from 0 to {mllm.vocab_size - 1}; got {shown(self.token)}.", param="nudge.token"
            )

    def report(self, measured: Any) -> dict[str, Any]:
        return self.settings()


class NudgeSlots(Slots):
    """Token and addition of each slot. token: (slots, 1) int64. by: (slots, 1) float32, 0 where nothing was asked for."""

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self.token = torch.zeros(pool.slots, 1, dtype=torch.int64, device=pool.device)
        self.by = torch.zeros(pool.slots, 1, device=pool.device)

    def place(self, sequence: Sequence) -> None:
        nudge = sequence.spec.asked.get(self.name)
        token, by = (nudge.token, nudge.by) if isinstance(nudge, Nudge) else (0, 0.0)
        self.token[sequence.slot], self.by[sequence.slot] = token, by

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if not any(self.name in sequence.spec.asked for sequence in sequences):
            return logits
        return logits.scatter_add(1, self.token[slots], self.by[slots])
