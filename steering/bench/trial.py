"""The setup of a section of the benchmark."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steering.bench.asking import chat, noise, words
from steering.bench.shapes import PATCH, SHAPES, ModelShape, random_model
from steering.front.engine import Engine
from steering.model.mllm import MLLM
from steering.protocol.readout import Diagnose
from steering.protocol.request import Interventions, Request, Sampling


@dataclass(frozen=True)
class Trial:
    """A setup. shape: the name of the model shape. device, dtype: of the model. quick: fewer and smaller repeats."""

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
        """Tokens of an answer, so many that some steps come after the last prefill and before the first end."""
        return max(6, self.size.tokens // (2 if self.quick else 1)) + max(self.size.batches)

    def model(self) -> MLLM:
        """Return the random model."""
        return random_model(self.size, self.place, getattr(torch, self.dtype))

    def engine(self, slots: int, **options: Any) -> Engine:
        """Return an engine on the model, as the server has it but without the self-check; prompts come in at full speed."""
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
        sampling: Mapping[str, Any] | None = None,
    ) -> Request:
        """Return a request with `text` words (default: the shape's prompt) and a new picture of (columns, rows) tokens.

        sampling: options of it, which is greedy by default.
        """
        question = words(random.Random(), self.size.prompt if text is None else text)
        pictures = [] if picture is None else [noise((PATCH * picture[0], PATCH * picture[1]))]
        return Request(
            chat(question, *pictures),
            Sampling(max_tokens=tokens or self.tokens, ignore_eos=True, **sampling or {}),
            interventions=interventions,
            diagnose=diagnose,
        )
