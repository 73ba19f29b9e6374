"""Small models of other families than the embedded one, with weights that are drawn, a vector and a calibration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import steering
from served.naming import name_as_published
from steering.model.calibration import Calibration
from tests import families

LAYERS = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    },
    "llava": {"head_dim": 32},
}  # fmt: skip
"""By family, how its text model differs from that of other tests: vLLM's kernel for CPUs takes heads of 32 at least."""
RECURRENT: dict[str, Any] = {
    "text": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "conv_dim": 64,
        "block_dim": 64,
        "tie_word_embeddings": True,
    },
    "vision": {"vision_use_head": False},
}
"""What LFM2-VL has: one head, since vLLM's rotary kernel for CPUs rotates only the first."""

PIXELS = 84 * 84
"""The pixels of the tests' pictures."""


def made(family: str, folder: Path) -> Path:
    """Return the folder of a family's model with a vector and a calibration."""
    changes = RECURRENT if family == "lfm2_vl" else {"text": FAMILIES[family]}
    built = families.build(family, folder, layers=LAYERS, **changes)
    name_as_published(built)
    keep_sizes(built)
    mllm, drawn = steering.load(built, device="cpu"), torch.Generator().manual_seed(0)
    (folder / "vectors").mkdir()
    weights = (torch.ones(LAYERS) for _ in range(3))
    direction = torch.randn(LAYERS, mllm.hidden_size, generator=drawn)
    vector = steering.SteeringVector("modality-preference", direction, *weights, (1, 2), mllm.fingerprint)
    vector.save(folder / "vectors" / "modality-preference.safetensors")
    Calibration(mllm.fingerprint).with_divergence(torch.rand(LAYERS, 200, generator=drawn), samples=1).save(folder)
    return folder


def keep_sizes(folder: Path) -> None:
    """Let pictures of the tests keep their size: Pillow, here, and torchvision, in vLLM, resize slightly differently."""
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    if "longest_edge" in config.get("size", {}):
        config["size"]["longest_edge"] = PIXELS
        file.write_text(json.dumps(config))
