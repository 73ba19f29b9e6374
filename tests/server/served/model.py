"""A small checkpoint that can be asked for everything: two layers, tools, a steering vector and a calibration."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import steering
from steering.cpu.packages.store import default_folder
from steering.model.calibration import FILE, SHARES, Calibration
from tests.families import build
from tests.families.calling import KINDS, template
from tests.server.fakes import checkpoint

FAMILY = "qwen2_vl"
"""Family of the model that is served; its vision encoder is compiled, too."""
LAYERS = 2
VECTOR = "modality-preference"
KEPT = default_folder().parent / "compiled-by-tests"
"""Folder that keeps compiled steps between runs of the suite: they depend on the source of what they compute."""


def served_model(folder: Path, tame: float = 2.0) -> Path:
    """Build the checkpoint in a folder, and return that. tame: what all logits are divided by."""
    told, call, specials = KINDS["hermes"]
    build(FAMILY, folder, specials=specials, layers=LAYERS)
    (folder / "chat_template.jinja").write_text(template(told, call))
    _tame(folder / "model.safetensors", tame)
    mllm = steering.load(folder, device="cpu")
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(LAYERS, mllm.hidden_size, generator=generator)
    ones = torch.ones(LAYERS)
    layers = tuple(range(LAYERS))
    vector = steering.SteeringVector(VECTOR, direction, ones / 4, ones, ones, layers, mllm.fingerprint)
    vectors = folder / "vectors"
    vectors.mkdir(exist_ok=True)
    vector.save(vectors / f"{VECTOR}.safetensors")
    _calibration(mllm.fingerprint).save(folder)
    return folder


def _tame(weights: Path, by: float) -> None:
    """Divide all logits: what rounds in them rounds in log-probabilities, which are compared with 1e-5."""
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / by
    save_file(tensors, weights, metadata={"format": "pt"})


def _calibration(fingerprint: str) -> Calibration:
    """Numbers of a calibration, those of its flags and its alarm from the embedded model's."""
    known = json.loads((checkpoint() / FILE).read_text())
    embedded = Calibration.load(checkpoint(), known["fingerprint"], len(known["divergence"]))
    assert embedded is not None
    quantiles = tuple(tuple(share * 0.02 for share in SHARES) for _ in range(LAYERS))
    sinks = torch.rand(LAYERS, 2, 2, generator=torch.Generator().manual_seed(1))
    return Calibration(
        fingerprint,
        divergence=quantiles,
        samples=1,
        tokens=1,
        sinks=tuple(tuple(tuple(round(x, 4) for x in row) for row in layer) for layer in sinks.tolist()),
        images=1,
        flags=embedded.flags,
        alarm=embedded.alarm,
        surprise=5.0,
        contexts=1,
    )
