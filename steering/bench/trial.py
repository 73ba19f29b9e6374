"""What a section of the benchmark is given."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from steering.bench.asking import chat, noise, words
from steering.bench.shapes import PATCH, SHAPES, ModelShape, random_model
from steering.engine.engine import Engine
from steering.model.mllm import MLLM
from steering.protocol.readout import Diagnose
from steering.protocol.request import Interventions, Request, Sampling


@dataclass(frozen=True)
class Trial:
    """shape: the model's, by name. device, dtype: where it runs, and its weights. quick: fewer repeats of less."""

    shape: str
    device: str
    dtype: str
    quick: bool = False

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)

    @property
    def size(self) -> ModelShape:
        return SHAPES[self.shape]

    @property
    def tokens(self) -> int:
        """Of an answer: there are steps in which the last prompt is in and the first answer has not ended."""
        return max(6, self.size.tokens // (2 if self.quick else 1)) + max(self.size.batches)

    def model(self) -> MLLM:
        """The random model."""
        return random_model(self.size, self.place, getattr(torch, self.dtype))

    def engine(self, slots: int, **options: Any) -> Engine:
        """An engine on it, as the server has it, but that it does not check itself; prompts come in as fast as they can."""
        settings: dict[str, Any] = {"max_length": self.size.length, "self_check": False, "image_cache_bytes": 2**30}
        settings["compiled"] = self.place.type == "cuda"
        return Engine(self.model(), slots=slots, **settings | options)

    def ask(
        self,
        *,
        text: int | None = None,
        picture: tuple[int, int] | None = None,
        interventions: Interventions = (),
        diagnose: Diagnose | None = None,
        tokens: int | None = None,
    ) -> Request:
        """A request with so many words (default: the shape's prompt) and a new picture of (columns, rows) tokens."""
        question = words(random.Random(), self.size.prompt if text is None else text)
        pictures = [] if picture is None else [noise((PATCH * picture[0], PATCH * picture[1]))]
        return Request(
            chat(question, *pictures),
            Sampling(max_tokens=tokens or self.tokens, ignore_eos=True),
            interventions=interventions,
            diagnose=diagnose,
        )
