"""Image processors that transformers has for torchvision alone, with Pillow in its place.

Of torchvision they need resizing and normalising, which their base class calls; what else they do is plain torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, image_processing_backends
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, IMAGE_PROCESSOR_MAPPING_NAMES

PROCESSORS = {"lfm2_vl": "Lfm2VlImageProcessor"}
"""Their classes by the type of model, in modules that import torchvision's functions for the names of types."""
FUNCTIONS = "torchvision.transforms.v2"


class Pillow(TorchvisionBackend):
    """Computes by Pillow and torch what its base class does by torchvision."""

    def resize(self, image: torch.Tensor, *args: Any, antialias: bool = True, **kwargs: Any) -> torch.Tensor:
        """Return pictures (n, channels, height, width) in another size."""
        return torch.from_numpy(np.stack([PilBackend.resize(self, one.numpy(), *args, **kwargs) for one in image]))

    def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
        mean, std = (torch.as_tensor(value)[:, None, None] for value in (mean, std))
        return (image - mean) / std


def register() -> None:
    """Make those known to transformers that it lacks where torchvision is not installed; further calls do nothing."""
    for model_type, name in PROCESSORS.items():
        module = f"transformers.models.{model_type}.image_processing_{model_type}"
        if module not in sys.modules and "pil" not in IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, ("pil",)):
            made = getattr(_imported(module), name)
            IMAGE_PROCESSOR_MAPPING.register(CONFIG_MAPPING[model_type], {"pil": made}, exist_ok=True)


def _imported(name: str) -> ModuleType:
    """Import a module of transformers whose classes then have the base class above."""
    absent = {part: ModuleType(part) for part in ("torchvision", "torchvision.transforms", FUNCTIONS)}
    absent[FUNCTIONS].functional = None  # type: ignore[attr-defined]
    backends: Any = image_processing_backends
    sys.modules |= absent
    backends.TorchvisionBackend = Pillow
    try:
        return importlib.import_module(name)
    finally:
        backends.TorchvisionBackend = TorchvisionBackend
        for part in absent:
            del sys.modules[part]
