"""The benchmark of the host's work runs every kind of request in graphs."""

from __future__ import annotations

import pytest

import steering
from benchmarks.step_budget import host
from steering.accel.cuda_graphs import DecodeGraphs


@pytest.fixture(scope="module")
def mllm() -> steering.MLLM:
    return steering.load(device="cpu")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[DecodeGraphs]:
    """Return a list to which the benchmark's graphs are appended."""
    made: list[DecodeGraphs] = []

    def noted(*args: object, **options: object) -> DecodeGraphs:
        made.append(DecodeGraphs(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(host, "DecodeGraphs", noted)
    return made


@pytest.mark.parametrize("kind", host.KINDS)
def test_every_step_is_a_graph(
    kind: str, mllm: steering.MLLM, graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "STEPS", 4)
    assert host.milliseconds(mllm, 3, host.KINDS[kind](mllm)) > 0
    assert graphs[0].taken >= host.STEPS + 10


@pytest.mark.parametrize("kind", ["plain", "steered, with focus and modality", "See"])
def test_every_prompt_is_in_a_graph(
    kind: str, mllm: steering.MLLM, graphs: list[DecodeGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROMPTS", 2)
    assert host.prompt_milliseconds(mllm, host.KINDS[kind](mllm), graphs=True) > 0
    assert graphs[0].prompts.taken >= 10
