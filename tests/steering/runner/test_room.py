"""Keys and values that are allotted at the start: as a prompt would have made them, as many slots as there is memory for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from steering import MLLM, Request, Sampling, UnsupportedModel
from steering.core.budget import MERGED
from steering.decoder.kv import KVPool
from steering.devices import free_bytes
from steering.runner import room, runner
from steering.runner.room import allotted, at_once
from tests import families
from tests.steering.conftest import LoadMLLM, MakeEngine

FAMILY = "qwen2_vl"


def slot_bytes(mllm: MLLM, columns: int) -> int:
    """Keys and values of a slot in float32, by the config."""
    text = mllm.text_config
    width = text.hidden_size // text.num_attention_heads
    return 4 * columns * 2 * text.num_hidden_layers * text.num_key_value_heads * width


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl_moe", "gemma3", "glm4v", "idefics3", "paligemma2"])
def test_slots_equal_those_of_a_first_prompt(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family, slots=2, max_length=128)
    engine.generate([Request(families.example_messages(family, 1), Sampling(max_tokens=1))])
    pool = at_once(engine.mllm, 2, 128, share=0.9, reserved=0)
    for tensor, used in zip(pool.tensors, engine.core.runner.pool.tensors, strict=True):
        assert (tensor.shape, tensor.dtype, tensor.device) == (used.shape, used.dtype, used.device)
        assert not tensor.any()


def test_slots_are_as_many_as_fit_beside_the_caches(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mllm, columns = load_mllm(FAMILY), 128
    size = slot_bytes(mllm, columns)
    monkeypatch.setattr(room, "free_bytes", lambda device: 10 * size)
    with caplog.at_level(logging.INFO, "steering.runner.room"):
        assert at_once(mllm, 4, 100, share=0.9, reserved=0).slots == 4
    assert [record.message for record in caplog.records] == [
        f"keys and values: 4 slots of 128 columns, {4 * size / 2**30:.3g} GiB"
    ]
    pool = at_once(mllm, 16, 100, share=0.9, reserved=2 * size)
    assert (pool.slots, pool.length, pool.bytes) == (7, columns, 7 * size)
    assert "there is room for 7 slots, not for 16" in caplog.text
    with pytest.raises(UnsupportedModel, match=r"leaves no room for an answer.*'max_length'"):
        at_once(mllm, 16, 100, share=0.9, reserved=9 * size)


def test_the_largest_prefill_has_room_beside_the_slots(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's profiler counts the most memory that a pass takes."""
    reserved: list[int] = []

    def noting(*given: Any) -> KVPool:
        reserved.append(given[-1])
        return allotted(*given)

    monkeypatch.setattr(runner, "allotted", noting)
    engine = make_engine(
        FAMILY, slots=1, max_length=640, prefill_budget=128, image_cache_bytes=5, prefix_cache_bytes=2**16
    )
    assert reserved == [5 + 2**16 + room.pass_bytes(engine.mllm, MERGED * 128)]
    request = Request([{"role": "user", "content": "what " * 160}], Sampling(max_tokens=1))
    with torch.profiler.profile(profile_memory=True) as profile:
        engine.generate([request])
    most = now = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    keys = engine.core.runner.pool.bytes
    assert 0 < most - keys < room.pass_bytes(engine.mllm, 512)


def test_memory_on_a_cpu_is_taken_when_slots_are_used(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = load_mllm(FAMILY)
    size = 3 * slot_bytes(mllm, 100)
    written, zero = list[torch.Tensor](), torch.Tensor.zero_
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: written.append(tensor) or zero(tensor))
    monkeypatch.setattr(room, "COMMITTED", size)
    pool = allotted(mllm, 3, 100)
    assert sum(tensor.nbytes for tensor in written) == size
    assert (pool.slots, pool.length, pool.layers, pool.bytes) == (3, 100, mllm.num_layers, size)
    assert not any(tensor.any() for tensor in pool.tensors)
    monkeypatch.setattr(room, "COMMITTED", size - 1)
    written.clear()
    pool = allotted(mllm, 3, 100)
    assert (pool.slots, pool.length, pool.bytes, written) == (3, 100, size, [])
    assert allotted(load_mllm(FAMILY), 3, 100, graphs=True).length == 192
    assert free_bytes(torch.device("cpu")) is None


def test_free_memory_includes_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert free_bytes(torch.device("cuda")) == 1100
