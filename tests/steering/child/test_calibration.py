"""A calibration that changes while a model is served: both processes answer under the same one, each answer under one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import steering
from server.engine.local import LocalEngine, calibration_files
from server.settings import Settings
from steering import Auto, Criterion, Diagnose, Request, Sampling, Think, VectorStore
from steering.core.core import EngineCore
from steering.messages.messages import Add
from steering.model.calibration import SHARES, Calibration
from tests.server.fakes import checkpoint
from tests.steering.child.conftest import Apart
from tests.steering.parallel.asking import picture

Make = Callable[..., Apart]
CHAT = [{"role": "user", "content": [{"type": "image", "image": picture(0)}, {"type": "text", "text": "What?"}]}]
CONTEXT = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": picture(0)},
            {"type": "text", "text": "A red circle is here.", "span": "context"},
            {"type": "text", "text": "What?"},
        ],
    }
]
ONE = Sampling(max_tokens=3, temperature=0, ignore_eos=True)


def calibrated(mllm: steering.MLLM, threshold: float) -> Calibration:
    """Return a calibration whose thresholds of D are all the same, and its bound of surprise as well."""
    rows = tuple(tuple(threshold for _ in SHARES) for _ in range(mllm.num_layers))
    known = Calibration.load(checkpoint(), mllm.fingerprint, mllm.num_layers)
    assert known is not None
    return replace(known, divergence=rows, surprise=threshold, alarm=replace(known.alarm, threshold=threshold))  # type: ignore[type-var]


def shares(choice: steering.Choice) -> tuple[bool, str | None, float]:
    """Return whether every update of an answer was damped, and the digests and the threshold that it reports."""
    assert choice.applied is not None
    assert choice.diagnostics is not None
    think, alarm = choice.applied["sage"]["think"], choice.diagnostics["alarm"]
    assert think["calibration"] == alarm["calibration"]["digest"]
    return min(think["suppressed"]) == 1.0, think["calibration"], alarm["threshold"]


@pytest.fixture(params=["apart", "within"])
def served(
    request: pytest.FixtureRequest, model: steering.MLLM, apart: Make, tmp_path: Path
) -> Iterator[tuple[LocalEngine, Path]]:
    """Yield an engine whose core is in another process, or in this one, and the folder of its calibrations."""
    folder, settings = tmp_path / "calibrations", Settings(model=str(checkpoint()), vectors=[str(tmp_path)])
    if request.param == "apart":
        there = apart()
        there.engine._files = calibration_files(there.client.mllm, settings)
        yield there.engine, folder
        return
    engine = steering.Engine(model, slots=4, threads=1, self_check=False)
    local = LocalEngine(engine, files=calibration_files(engine.mllm, settings))
    local.start()
    yield local, folder
    local.stop()


def asked() -> Request:
    return Request(CHAT, ONE, Think(), Diagnose(["alarm"]))


def test_a_new_calibration_is_picked_up_by_both_ends(
    served: tuple[LocalEngine, Path], model: steering.MLLM, caplog: pytest.LogCaptureFixture
) -> None:
    engine, folder = served
    none, everything = calibrated(model, 1e30), calibrated(model, 0.0)
    none.keep(folder)
    with caplog.at_level(logging.INFO, "helmsight"), engine.turn() as turn:
        assert shares(turn.submit(asked()).result().choices[0]) == (False, none.digest, 1e30)
    assert f"digest {model.calibration.digest} before, {none.digest} now" in caplog.text  # type: ignore[union-attr]
    assert "divergence, alarm, surprise" in caplog.text
    with engine.turn() as turn:
        everything.keep(folder)  # while the turn is on its way
        assert shares(turn.submit(asked()).result().choices[0]) == (False, none.digest, 1e30)
    with engine.turn() as turn:
        assert turn.calibration == everything
        assert shares(turn.submit(asked()).result().choices[0]) == (True, everything.digest, 0.0)
    assert engine.capabilities.about["calibration"]["digest"] == everything.digest
    assert engine.calibration() == everything


def test_an_answer_that_waits_keeps_its_calibration(
    served: tuple[LocalEngine, Path], model: steering.MLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The core takes the request in after the client was told of another calibration."""
    engine, folder = served
    none, everything = calibrated(model, 1e30), calibrated(model, 0.0)
    none.keep(folder)
    add = EngineCore.add

    def late(core: EngineCore, request: Add, *rest: Any, **more: Any) -> Any:
        everything.keep(folder)
        assert engine.calibration() == everything
        return add(core, request, *rest, **more)

    with engine.turn() as turn:
        monkeypatch.setattr(EngineCore, "add", late)
        completion = turn.submit(asked())
        monkeypatch.undo()
        assert shares(completion.result().choices[0]) == (False, none.digest, 1e30)


def test_a_prelude_and_its_answer_are_of_one_calibration(
    served: tuple[LocalEngine, Path], model: steering.MLLM
) -> None:
    engine, folder = served
    low, high = calibrated(model, 0.0), calibrated(model, 1e30)
    vector = VectorStore(str(model.path) + "/vectors").get("modality-preference")
    request = Request(CONTEXT, ONE, [Auto(vector, criterion=Criterion("surprise")), Think()], Diagnose(["alarm"]))
    low.keep(folder)
    with engine.turn() as turn:
        high.keep(folder)
        assert engine.calibration() == high
        decided = turn.decide(request, lambda completion: None)
        choice = turn.submit(decided).result().choices[0]
    assert choice.applied is not None
    (steer,) = choice.applied["steering"]
    assert (steer["auto"]["bound"], steer["auto"]["calibration"], steer["toward"]) == (0.0, low.digest, "vision")
    assert shares(choice) == (True, low.digest, 0.0)


def test_without_a_calibration_an_answer_says_whose_thresholds_it_has(model: steering.MLLM) -> None:
    engine = steering.Engine(model, slots=4, threads=1, self_check=True)
    engine.calibrate(None)
    (result,) = engine.generate([Request(CHAT, ONE, Think())])
    assert result.choices[0].applied is not None
    think = result.choices[0].applied["sage"]["think"]
    assert (think["calibrated"], think["calibration"]) == (False, None)
    assert "probe --calibrate-sage" in think["warning"]
