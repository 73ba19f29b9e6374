"""Facts about a loaded model that the process without its weights cannot know by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from steering.front.engine import Engine
from steering.front.input_processor import Limits
from steering.model.calibration import Calibration
from steering.model.mllm import MLLM


@dataclass(frozen=True)
class ModelFacts:
    """The properties of a loaded model, and the limits of its engine core.

    `calibration` and `checked` are those of `MLLM`; `magnitudes` (layers,) is None where nothing steers.
    """

    fingerprint: str
    updates_add_up: bool
    calibration: Calibration | None
    checked: Calibration | None
    dtype: str
    devices: tuple[str, ...]
    quantization: str | None
    limits: Limits
    magnitudes: torch.Tensor | None

    @classmethod
    def of(cls, engine: Engine, magnitudes: torch.Tensor | None) -> ModelFacts:
        """Return the facts of an engine."""
        mllm = engine.mllm
        return cls(
            mllm.fingerprint,
            mllm.updates_add_up,
            mllm.calibration,
            mllm.checked,
            str(mllm.dtype).removeprefix("torch."),
            tuple(map(str, mllm.devices)),
            mllm.quantization,
            engine.limits,
            magnitudes,
        )

    def complete(self, mllm: MLLM) -> None:
        """Complete a model that was loaded without its weights, so that it reports and checks the same as the loaded one."""
        mllm.fingerprint, mllm.updates_add_up = self.fingerprint, self.updates_add_up
        mllm.calibration, mllm.checked = self.calibration, self.checked
        mllm.dtype = getattr(torch, self.dtype)
        mllm.devices = tuple(map(torch.device, self.devices))
        mllm.quantization = self.quantization  # type: ignore[assignment]  # "int8", as it was sent
