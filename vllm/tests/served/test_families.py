"""Other families than the embedded model's: small ones with weights that are drawn, against our own engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from served import asked
from served.conftest import connected
from served.serving import served
from steering import Inapplicable
from steering.model.calibration import Calibration
from tests import families
from tests.steering.parallel.asking import requests

LAYERS = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
    },
    "llava": {"head_dim": 32},
}  # fmt: skip
"""By family, how its text model differs from that of other tests: vLLM's kernel for CPUs takes heads of 32 at least."""


def made(family: str, folder: Path) -> Path:
    """Return the folder of a family's model with a vector and a calibration."""
    built = families.build(family, folder, layers=LAYERS, text=FAMILIES[family])
    mllm, drawn = steering.load(built, device="cpu"), torch.Generator().manual_seed(0)
    (folder / "vectors").mkdir()
    weights = (torch.ones(LAYERS) for _ in range(3))
    direction = torch.randn(LAYERS, mllm.hidden_size, generator=drawn)
    vector = steering.SteeringVector("modality-preference", direction, *weights, (1, 2), mllm.fingerprint)
    vector.save(folder / "vectors" / "modality-preference.safetensors")
    Calibration(mllm.fingerprint).with_divergence(torch.rand(LAYERS, 200, generator=drawn), samples=1).save(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_of_other_families(family: str, tmp_path: Path, work: Path) -> None:
    folder = made(family, tmp_path / family)
    own = steering.Engine(steering.load(folder, device="cpu"), slots=8, threads=1)
    with served(folder, work, "--enforce-eager") as url, connected(own, folder, url) as client:
        listed = {}
        for name, request in requests(own.mllm).items():
            try:
                client.inspect(request)
            except Inapplicable:
                continue
            if name != "sampled":
                listed[name] = request
        assert {"steered", "icd", "think", "grammar"} <= listed.keys()
        pending = {name: client.submit(request) for name, request in listed.items()}
        found = {name: completion.result() for name, completion in pending.items()}
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))
