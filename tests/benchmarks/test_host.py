"""The benchmark of the host's work runs every kind of request in graphs."""

from __future__ import annotations

import pytest

import steering
from benchmarks.step_budget import host
from steering.accel.cuda_graphs import DecodeGraphs


@pytest.fixture(scope="module")
def mllm() -> steering.MLLM:
    return steering.load(device="cpu")


@pytest.mark.parametrize("kind", host.KINDS)
def test_every_step_is_a_graph(kind: str, mllm: steering.MLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STEPS", 4)
    graphs: list[DecodeGraphs] = []

    def noted(*args: object, **options: object) -> DecodeGraphs:
        graphs.append(DecodeGraphs(*args, **options))  # type: ignore[arg-type]
        return graphs[-1]

    monkeypatch.setattr(host, "DecodeGraphs", noted)
    assert host.milliseconds(mllm, 3, host.KINDS[kind](mllm)) > 0
    assert graphs[0].taken >= host.STEPS + 10
