"""A model that lies on several devices: the same answers, and what cannot be laid so is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import steering
from steering import Engine, UnsupportedModel
from steering.model import loading
from steering.protocol.intervention import REGISTRY
from tests.families import checkpoint
from tests.steering.conftest import MakeEngine
from tests.steering.parallel.asking import computed_apart, differences, requests
from tests.steering.parallel.spread import WITHIN, spread


@pytest.mark.slow
def test_answers_of_a_model_on_two_devices_are_those_of_the_model_on_one(model: Path) -> None:
    alone, apart = computed_apart(spread, model)
    assert alone.keys() == requests(steering.load(model, device="cpu")).keys() - set(WITHIN)
    assert differences(alone, apart) == []


def test_every_intervention_is_among_the_requests(model: Path) -> None:
    all_requests = requests(steering.load(model, device="cpu"))
    assert {name for request in all_requests.values() for name in request.asked} == set(REGISTRY)
    covered = {name for key, request in all_requests.items() if key not in WITHIN for name in request.asked}
    assert set(REGISTRY) - covered == {"contrast.icd"}, "on two devices, another contrast's twin"


def test_the_comparison_finds_differences() -> None:
    values = {"a": [1.0, 200.0, None], "b": "x"}
    assert differences(values, {"a": [1.00005, 200.005, None], "b": "x"}) == []
    assert len(differences(values, {"a": [1.001, 200.0, None], "b": "y"})) == 2
    assert len(differences(values, {"a": [1.0, 200.0], "b": "x"})) == 1


def test_auto_on_a_machine_without_gpus_is_the_cpu(root: Path) -> None:
    mllm = steering.load(checkpoint("qwen2_vl", root), device_map="auto")
    assert mllm.devices == (torch.device("cpu"),)


def test_a_map_beside_a_device_is_refused(root: Path) -> None:
    with pytest.raises(UnsupportedModel, match="leave 'device' out, which is 'cpu'"):
        steering.load(checkpoint("qwen2_vl", root), device="cpu", device_map="auto")


def test_a_map_without_accelerate_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"helmsight\[parallel\]"):
        steering.load(checkpoint("qwen2_vl", root), device_map="auto")


def test_a_model_larger_than_its_devices_is_refused() -> None:
    places = {"model.visual": 0, "layers.0": 1, "layers.1": "cpu", "lm_head": "disk"}
    with pytest.raises(UnsupportedModel, match=re.escape("layers.1 and 1 more of 4 parts")):
        loading.refuse_offloaded(SimpleNamespace(hf_device_map=places))
    loading.refuse_offloaded(SimpleNamespace(hf_device_map={"": "cpu"}))
    loading.refuse_offloaded(SimpleNamespace())


def test_a_model_on_several_devices_is_not_compiled(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = make_engine("qwen2_vl").mllm
    monkeypatch.setattr(mllm, "devices", (torch.device("cuda:0"), torch.device("cuda:1")))
    with pytest.raises(UnsupportedModel, match="lies on 2 devices"):
        Engine(mllm, compiled=True)
