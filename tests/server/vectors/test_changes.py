"""Vectors and calibrations that change while a server runs: said in log, answer, journal and metrics."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.engine.local import LocalEngine
from server.settings import Settings
from steering.model.calibration import Calibration
from steering.model.calibration_files import CalibrationFiles, under
from tests.server.conftest import ask, data_uri
from tests.server.fakes import checkpoint
from tests.server.journal.rows import rows_of

NAME = "modality-preference"


def served(engine: steering.Engine, folder: Path, **more: Any) -> FlaskClient:
    journal = f"sqlite:///{folder / 'journal.db'}"
    return create_app(Settings(vectors=(str(folder),), journal=journal, **more), engine=engine).test_client()


def steered(client: FlaskClient, **fields: Any) -> dict[str, Any]:
    answer = ask(client, data_uri(), "What is it?", max_tokens=2, **{"steering": {"toward": "vision"}} | fields)
    assert answer.status_code == 200, answer.json
    applied: dict[str, Any] = answer.json["choices"][0]["applied"]
    return applied


def test_a_new_vector_of_a_name_is_said_everywhere(
    engine: steering.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The new file hides the model's own vector, as that of a probe did in silence."""
    client = served(engine, tmp_path)
    old = steering.VectorStore(checkpoint() / "vectors").get(NAME)
    with caplog.at_level(logging.INFO, "helmsight"):
        assert steered(client)["steering"][0]["digest"] == old.identity
        assert "changed" not in caplog.text
        new = (0.5 * old).named(NAME)
        new.save(tmp_path / f"{NAME}.safetensors")
        assert steered(client)["steering"][0]["digest"] == new.identity
    (line,) = [record.getMessage() for record in caplog.records if "changed" in record.getMessage()]
    assert line == f"steering vector {NAME} changed: digest {old.identity} before, {new.identity} now"
    rows = rows_of(client, 2)
    assert [row["digests"] for row in rows] == [[f"{NAME}@{new.identity}"], [f"{NAME}@{old.identity}"]]
    assert engine.mllm.calibration is not None
    assert {row["calibration"] for row in rows} == {engine.mllm.calibration.digest}
    metrics = client.get("/metrics").text
    assert f'helmsight_vector_info{{digest="{new.identity}",vector="{NAME}"}} 1.0' in metrics
    assert f'helmsight_calibration_info{{digest="{engine.mllm.calibration.digest}"}} 1.0' in metrics
    listed = client.get(f"/v1/steering/vectors/{NAME}").json
    assert listed["digest"] == new.identity


def test_a_request_and_a_preset_may_pin_a_digest(
    engine: steering.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = steering.VectorStore(checkpoint() / "vectors").get(NAME)
    pin = f"{NAME}@{old.identity[:12]}"
    presets = {
        "pinned": {"fields": {"steering": {"vector": pin, "toward": "vision"}}, "source": "test"},
        "plain": {"fields": {"temperature": 0.5}, "source": "test"},
    }
    client = served(engine, tmp_path, presets=presets)
    model = {"model": "helmsight-demo@pinned", "steering": None}
    assert steered(client, **model)["steering"][0]["name"] == NAME
    assert steered(client, steering={"vectors": [{"name": pin}]})["steering"][0]["digest"] == old.identity
    (0.5 * old).named(NAME).save(tmp_path / f"{NAME}.safetensors")
    cases: list[tuple[dict[str, Any], str]] = [
        (model, "steering.vector"),
        ({"steering": {"vector": pin}, "strict": False}, "steering.vector"),
        ({"steering": {"vectors": [{"name": pin}]}}, "steering.vectors[0].name"),
        ({"project_out": {"vector": pin}}, "project_out.vector"),
    ]
    for fields, param in cases:
        answer = ask(client, data_uri(), "What is it?", **fields)
        assert (answer.status_code, answer.json["error"]["code"]) == (400, "vector_digest_mismatch"), fields
        assert answer.json["error"]["param"] == param
        assert old.identity[:12] in answer.json["error"]["message"]
    with caplog.at_level(logging.WARNING, "helmsight"):  # a start with a pin that does not match serves the rest
        again = served(engine, tmp_path, presets=presets)
    assert "preset 'pinned'" in caplog.text
    assert "is refused" in caplog.text
    assert ask(again, "What?", model="helmsight-demo@plain", max_tokens=1).status_code == 200


def test_a_calibration_is_picked_up_without_a_restart(
    engine: steering.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server of a model without calibration refuses what needs one, until another command has kept it."""
    mllm = under(engine.mllm, None)
    own = steering.Engine(mllm, slots=2, threads=1, self_check=False)
    folder = tmp_path / "calibrations"
    files = CalibrationFiles(None, mllm.fingerprint, mllm.num_layers, None, folder)
    local = LocalEngine(own, files=files)
    local.start()
    settings = Settings(vectors=(str(tmp_path),), journal=f"sqlite:///{tmp_path / 'journal.db'}")
    client = create_app(settings, engine=local).test_client()
    auto = {"toward": "auto", "auto": {"criterion": "surprise"}}
    chat = (data_uri(), "Text context: It is blue.\nWhat is it?")
    fields: dict[str, Any] = {"steering": auto, "diagnostics": {"include": ["alarm"]}, "max_tokens": 2}
    refusal = ask(client, *chat, **fields)
    assert refusal.status_code == 400
    assert "probe --calibrate-surprise" in refusal.json["error"]["message"]
    assert "helmsight_calibration_info" not in client.get("/metrics").text
    calibration = Calibration.load(checkpoint(), mllm.fingerprint, mllm.num_layers)
    assert calibration is not None
    digest = calibration.digest
    calibration.keep(folder)
    with caplog.at_level(logging.INFO, "helmsight"):
        answer = ask(client, *chat, **fields)
    assert answer.status_code == 200
    (choice,) = answer.json["choices"]
    assert choice["applied"]["steering"][0]["auto"]["calibration"] == digest
    assert choice["diagnostics"]["alarm"]["calibration"]["digest"] == digest
    assert f"digest none before, {digest} now" in caplog.text
    (row,) = rows_of(client, 1)
    assert row["calibration"] == digest
    assert f'helmsight_calibration_info{{digest="{digest}"}} 1.0' in client.get("/metrics").text
    assert 'helmsight_readout_available{readout="alarm"} 1.0' in client.get("/metrics").text
    assert client.get("/about").json["calibration"]["digest"] == digest
    local.stop()
