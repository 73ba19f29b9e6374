"""The default for compiling decode steps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

import steering
from steering.core.compilation import pays
from tests.steering.conftest import LoadMLLM


def test_small_layers_are_compiled_where_there_is_a_compiler(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mllm = load_mllm("qwen2_vl")
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert pays(mllm)
    monkeypatch.setenv("CXX", "nowhere-c++")
    assert not pays(mllm)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(mllm, "source", None)  # another process could not load it
    assert not pays(mllm)


@pytest.mark.parametrize(
    ("devices", "ranks", "alike", "captured"),
    [(1, 1, True, True), (2, 1, True, False), (1, 2, True, False), (1, 1, False, False)],
)
def test_on_one_gpu_steps_are_captured(devices: int, ranks: int, alike: bool, captured: bool) -> None:
    gpu = torch.device("cuda")
    ranked = SimpleNamespace(size=ranks)
    mllm = SimpleNamespace(device=gpu, devices=(gpu,) * devices, ranks=ranked, rotates_alike=alike)
    assert pays(cast(steering.MLLM, mllm)) is captured


def test_weights_of_which_two_would_be_too_much_are_packed_instead(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = load_mllm("qwen2_vl")
    monkeypatch.setenv("CXX", "sh")
    with torch.device("meta"):  # without its memory
        fits, large = nn.Linear(2**14, 2**13), nn.Linear(2**14, 2**15)
    monkeypatch.setitem(mllm.model._modules, "large", fits)
    assert pays(mllm)
    monkeypatch.setitem(mllm.model._modules, "large", large)
    assert not pays(mllm)
