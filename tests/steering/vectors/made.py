"""Small random vectors, and the parts of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from steering import SteeringVector, VectorError
from steering.vectors.sparse import SparseDictionary

LAYERS, WIDTH = 4, 6


def make(name: str = "preference", seed: int = 0, **changes: Any) -> SteeringVector:
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {
        "name": name,
        "direction": torch.randn(LAYERS, WIDTH, generator=generator),
        "weight": torch.rand(LAYERS, generator=generator) + 0.1,
        "mean_abs": torch.rand(LAYERS, generator=generator),
        "std": torch.rand(LAYERS, generator=generator),
        "layers": (1, 3),
        "fingerprint": "abc",
        "info": {"samples": 25, "calibration": {"range": [0.5, 1.5]}},
    }
    return SteeringVector(**fields | changes)


def parts(vector: SteeringVector) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of an artifact, to be changed and put together again by plain safetensors."""
    data = vector.to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), header["__metadata__"]


def refusal(data: bytes) -> VectorError:
    with pytest.raises(VectorError) as refused:
        SteeringVector.from_bytes(data)
    assert refused.value.code == "bad_vector"
    return refused.value


def dictionary(folder: Path, width: int, layer: int = 1, features: int = 40) -> SparseDictionary:
    """Write a random sparse dictionary for states of a model after a layer; return it."""
    drawn = torch.Generator().manual_seed(3)
    shapes = {"W_enc": (width, features), "W_dec": (features, width), "b_dec": (width,), "b_enc": (features,)}
    tensors = {name: torch.randn(shape, generator=drawn) / 4 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(tensors, folder / "sae_weights.safetensors")
    hook = {"hook_name": f"blocks.{layer}.hook_resid_post"}
    (folder / "cfg.json").write_text(json.dumps({"d_in": width, "d_sae": features, "metadata": hook}))
    return SparseDictionary.load(folder)
