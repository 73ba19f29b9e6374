"""A device that is lost ends the engine, whoever hears of it first; and other errors do not."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import steering
from server.engine import local
from server.settings import Settings
from steering import Engine, Fault, Request
from steering.core import steps
from steering.devices import lost
from steering.errors import UnsupportedModel
from tests import families
from tests.steering.conftest import LoadMLLM, MakeEngine
from tests.steering.core.faults.test_faults import CONTRASTED, FAMILY, SAMPLING, Once
from tests.waiting import wait_for


class Loses(Once):
    """A fault as `Once`, of a device that then stays lost; `calls` also counts later calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls >= self.at:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return self.real(*args, **kwargs)


def a_request() -> Request:
    return Request(families.example_messages(FAMILY, 1), SAMPLING, interventions=CONTRASTED, diagnose=True)


@pytest.mark.parametrize("stage", ["embed", "prefill", "next_tokens", "_decode", "read", "choice.masked"])
def test_a_lost_device_ends_the_engine_wherever_it_is_heard_of(
    stage: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FAMILY, slots=6)
    *part, name = stage.split(".")
    owner = getattr(engine.core.runner, *part) if part else engine.core.runner
    loses = Loses(getattr(owner, name), 1, behind=False)
    monkeypatch.setattr(owner, name, loses)
    with pytest.raises(torch.AcceleratorError):
        engine.generate([a_request()])
    assert loses.calls == 1, "nothing is tried again"


def test_a_mask_that_finds_the_device_lost_ends_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(FAMILY, slots=6)
    part: Any = engine.core.runner.interventions["sage.generate"]
    monkeypatch.setattr(part, "_mask", Loses(part._mask, 1, behind=False))
    with pytest.raises(torch.AcceleratorError):
        engine.generate([dataclasses.replace(a_request(), interventions=[steering.Generate(refresh=2)])])


@pytest.mark.parametrize("asked", [None, True])
def test_a_model_whose_steps_no_graph_takes_is_served_without_unless_graphs_were_asked_for(
    asked: bool | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[bool] = []

    def engine(mllm: object, *, compiled: bool, **options: object) -> str:
        tried.append(compiled)
        if compiled:
            raise UnsupportedModel("it waits for the host")
        return "engine"

    gpu = torch.device("cuda")
    mllm = SimpleNamespace(device=gpu, devices=(gpu,), ranks=SimpleNamespace(size=1), rotates_alike=True)
    monkeypatch.setattr(local.steering, "load", lambda *model, **options: mllm)
    monkeypatch.setattr(local.steering, "Engine", engine)
    settings = Settings(compiled=asked)
    if asked:
        with pytest.raises(UnsupportedModel):
            local.make_engine(settings)
        return
    made: object = local.make_engine(settings)
    assert (made, tried) == ("engine", [True, False])
    assert "not captured as CUDA graphs and are slower: it waits for the host" in caplog.text


def test_whoever_waits_is_told_and_the_process_ends(
    load_mllm: LoadMLLM, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr(local.steering, "load", lambda *model, **options: load_mllm(FAMILY))
    monkeypatch.setattr(local.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(local.logging, "shutdown", lambda: None)
    engine: Engine = local.make_engine(Settings(slots=2, max_length=256))
    monkeypatch.setattr(engine.core.runner, "decode", Loses(engine.core.runner.decode, 2, behind=False))
    engine.start()
    with pytest.raises(Fault, match="The engine died: CUDA error"):
        engine.submit(Request(families.example_messages(FAMILY, 1), SAMPLING)).result()
    wait_for(lambda: left)
    assert (left, engine.healthy) == ([1], False)


def test_a_device_that_does_not_answer_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    library = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")
    assert not lost(library, [cpu, gpu])
    assert asked == [gpu]
    assert not lost(torch.OutOfMemoryError("CUDA out of memory."), [gpu])
    full = torch.AcceleratorError("CUDA error: out of memory")
    full.error_code = 2  # type: ignore[attr-defined]
    assert not lost(full, [gpu])
    assert lost(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), [gpu])

    def broken(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert lost(library, [gpu])
    assert not lost(library, [cpu])
    assert steps.lost is lost


@pytest.mark.parametrize(
    ("code", "ends"), [(None, True), (700, True), (710, True), (2, False), (9, False), (901, False)]
)
def test_an_error_of_a_single_call_loses_no_device(code: int | None, ends: bool) -> None:
    """By CUDA's numbers: an illegal access and a failed assertion, lack of memory, a grid too large, a capture."""
    error = torch.AcceleratorError("CUDA error")
    if code is not None:
        vars(error)["error_code"] = code
    assert lost(error, [torch.device("cpu")]) == ends
