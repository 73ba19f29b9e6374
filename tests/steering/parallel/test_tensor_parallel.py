"""A model whose layers two processes share: the same answers as of one, and what cannot be shared is refused."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

import steering
from steering import Engine, UnsupportedModel
from steering.model import loading
from tests.families import checkpoint
from tests.forked import forked
from tests.steering.conftest import LoadMLLM, MakeEngine
from tests.steering.parallel.asking import differences, requests, told
from tests.steering.parallel.split import split

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Return the folder in which two processes left their results."""
    folder = tmp_path_factory.mktemp("split")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(forked(partial(split, rank, port, folder, model), folder / f"log-{rank}"))
            for rank in range(2)
        ]
        for process in ranks:
            process.join(150)
    for rank, process in enumerate(ranks):
        assert process.exitcode == 0, (folder / f"log-{rank}").read_text()[-4000:]
    return folder


@pytest.fixture(scope="module")
def said(ran: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((ran / "said.json").read_text())
    return report


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[Engine, dict[str, Any]]:
    """Return the engine of one process, and its results."""
    mllm = steering.load(model, device="cpu")
    engine = Engine(mllm, slots=6, max_length=512, prefill_budget=80, self_check=False)
    return engine, json.loads(json.dumps(told(engine, requests(mllm)), default=list))


def test_answers_of_two_processes_are_those_of_one(said: dict[str, Any], alone: tuple[Engine, dict[str, Any]]) -> None:
    engine, expected = alone
    assert differences(expected, said["answers"], tolerance=2e-4) == []
    assert differences(expected, said["again"], tolerance=2e-4) == []
    assert said["cached"] > 0
    assert said["fingerprint"] == engine.mllm.fingerprint
    assert said["kv_bytes"] == engine.stats()["kv_bytes"] / 2  # each has half of the heads


def test_ranks_stay_in_step_while_requests_come_fail_and_leave(
    said: dict[str, Any], alone: tuple[Engine, dict[str, Any]]
) -> None:
    _, expected = alone
    assert differences({name: expected[name] for name in said["together"]}, said["together"]) == []
    assert said["tripped"] == "The request failed in the engine: tripped"
    assert said["threads"] == []


def test_a_failure_in_one_process_ends_both(ran: Path, said: dict[str, Any]) -> None:
    assert (ran / "second.txt").read_text() == "tripped"
    assert (ran / "first.txt").read_text().startswith("False The engine died: ")


def test_processes_that_torchrun_has_not_started_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModel, match="--nproc-per-node 2; torchrun has started none"):
        steering.load(checkpoint("qwen2_vl", root), tensor_parallel=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UnsupportedModel, match="torchrun has started 3"):
        steering.load(checkpoint("qwen2_vl", root), tensor_parallel=2)


def test_a_model_that_cannot_be_divided_is_refused(root: Path, load_mllm: LoadMLLM) -> None:
    config = AutoConfig.from_pretrained(checkpoint("qwen2_vl", root))
    loading.refuse_split(config, 2)
    for size, why in ((3, "its 4 attention heads"), (4, "its 2 key-value heads")):
        with pytest.raises(UnsupportedModel, match=f"by {size} processes together: {why} cannot be divided"):
            loading.refuse_split(config, size)
    with pytest.raises(UnsupportedModel, match="its experts"):
        loading.refuse_split(AutoConfig.from_pretrained(checkpoint("qwen3_vl_moe", root)), 2)
    with pytest.raises(UnsupportedModel, match="transformers does not divide its layers"):
        loading.refuse_split(AutoConfig.from_pretrained(checkpoint("lfm2_vl", root)), 2)
    loading.refuse_sinks(load_mllm("qwen2_vl").model, 2)
    with pytest.raises(UnsupportedModel, match="by 2 processes together: its heads' attention sinks cannot be divided"):
        loading.refuse_sinks(load_mllm("gpt_oss").model, 2)
    text = SimpleNamespace(num_attention_heads=4, intermediate_size=97)
    with pytest.raises(UnsupportedModel, match="its 97 FFN neurons"):
        loading.refuse_split(SimpleNamespace(model_type="odd", get_text_config=lambda: text), 2)


def test_a_single_engine_follows_no_other(make_engine: MakeEngine, load_mllm: LoadMLLM) -> None:
    with pytest.raises(RuntimeError, match="other ranks"):
        make_engine("qwen2_vl").follow()
