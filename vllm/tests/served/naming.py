"""The names of a checkpoint's tensors, as published checkpoints and vLLM have them."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors.torch import load_file, save_file


def name_as_published(folder: Path) -> None:
    """Name a model's tensors as published checkpoints do: vLLM does not know all names that newer transformers write."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    named = {
        re.sub(r"^((?:model\.)?vision_tower)\.(?!vision_model\.)", r"\1.vision_model.", name): tensor
        for name, tensor in tensors.items()
    }
    save_file(named, file, metadata={"format": "pt"})
