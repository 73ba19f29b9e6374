"""Facts about a loaded model that the process without its weights cannot know by itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import steering
from server.settings import Settings
from steering.front.input_processor import Limits
from steering.model.calibration import Calibration


@dataclass(frozen=True)
class Facts:
    """The model and the limits of an engine core.

    `calibration` and `checked` are those of `steering.MLLM`; `magnitudes` (layers,) is None where nothing steers.
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
    def of(cls, engine: steering.Engine, magnitudes: torch.Tensor | None) -> Facts:
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

    def complete(self, mllm: steering.MLLM) -> None:
        """Complete a model that was loaded without its weights, so that it reports and checks the same as the loaded one."""
        mllm.fingerprint, mllm.updates_add_up = self.fingerprint, self.updates_add_up
        mllm.calibration, mllm.checked = self.calibration, self.checked
        mllm.dtype = getattr(torch, self.dtype)
        mllm.devices = tuple(map(torch.device, self.devices))
        mllm.quantization = self.quantization  # type: ignore[assignment]  # "int8", as it was sent


def load_without_weights(settings: Settings) -> steering.MLLM:
    """Return the model of the settings without its weights, which prepares requests; raises whatever loading raises."""
    mllm = steering.load(
        settings.model,
        dtype="float32",
        device="meta",
        local_files_only=not settings.download,
        name=settings.name,
        unread="",
        chat_template=settings.chat_template,
    )
    mllm.seen.capacity = settings.image_cache
    return mllm
