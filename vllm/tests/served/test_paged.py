"""Attention from paged keys by torch, as on GPUs, over the CPU kernel's cache: answers and factors are our own engine's."""

from __future__ import annotations

from pathlib import Path

import pytest

import steering
from served import asked
from served.conftest import connected
from served.serving import served, steps_of
from steering import Diagnose, Generate, Icd, Steer, SteeringVector

# Chunks of prompts and generated tokens are read in one step. Keys in bfloat16 are interleaved by some CPUs' kernels.
FLAGS = {"uncompiled": ("--enforce-eager", "--max-num-batched-tokens", "64"), "compiled": ()}


@pytest.mark.parametrize("mode", FLAGS)
def test_answers_and_factors(mode: str, own: steering.Engine, folder: Path, work: Path, vector: SteeringVector) -> None:
    listed = asked.steered(vector, 4) | {
        f"{name} {seed}": asked.request(seed, *interventions, images=1 + seed % 2, diagnose=Diagnose(asked.READ))
        for seed in range(3)
        for name, interventions in {
            "read": [],
            "generate": [Generate(refresh=4)],
            "icd": [Icd(), Steer.to(vector, "text")],
        }.items()
    }
    with served(folder, work, *FLAGS[mode], HELMSIGHT_ATTENTION="torch") as url, connected(own, folder, url) as client:
        found = dict(zip(listed, client.generate(listed.values()), strict=True))
        assert steps_of(url)["paged_layers"] > 100
    expected = {name: own.generate([request])[0] for name, request in listed.items()}
    assert not list(asked.faults(found, expected))
    assert any(result.choices[0].diagnostics["focus"] for result in found.values())
