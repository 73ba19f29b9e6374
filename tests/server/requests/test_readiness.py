"""A model's gaps are said in the log of the start, on its page, in the metrics and in each preset that does without."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.engine.local import LocalEngine
from server.engine.runtime import Runtime, Serving
from server.requests.readiness import measured, states
from server.settings import Settings
from steering.model.calibration import PARTS as MEASURED
from steering.model.calibration import Calibration
from steering.protocol.readout import REGISTRY
from steering.readiness import PARTS
from steering.readiness import VECTOR as VECTOR_PART
from tests.server.api.choices import QUESTION, choice_of
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import rows_of


@dataclass(frozen=True)
class Measured:
    """A calibration of a fake engine."""

    digest: str | None
    parts: tuple[str, ...]


def parts_of(client: FlaskClient) -> dict[str, bool]:
    (card, *_) = client.get("/v1/models").json["data"]
    return {part["part"]: part["there"] for part in card["prepared"]}


def series(client: FlaskClient) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    values = [line.split() for line in lines if line.startswith("helmsight_readout_available{")]
    return {name.split('"')[1]: float(value) for name, value in values}


def test_the_parts_are_those_that_a_calibration_and_the_registry_have() -> None:
    assert {part.measured for part in PARTS} == {*MEASURED, VECTOR_PART}
    assert {part.measured for part in PARTS if part.readouts & {"alarm", "flags"}} == {
        readout.calibrated_by for readout in REGISTRY.values() if readout.calibrated_by
    }
    assert {name for part in PARTS for name in part.readouts} <= REGISTRY.keys()


def test_a_model_without_calibration_says_so_at_its_start(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(model="/models/own", vectors=(), journal_readouts=("alarm", "flags", "decay"))
    with caplog.at_level(logging.INFO, "helmsight"):
        client = create_app(settings, engine=fake).test_client()
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [line.split(":")[0] for line in warned] == ["--journal-readouts alarm", "--journal-readouts flags"]
    assert all("'helmsight prepare /models/own'" in line for line in warned)
    (told,) = [record.getMessage() for record in caplog.records if "was not prepared" in record.getMessage()]
    assert all(f"{part.name}: missing" in told for part in PARTS)
    assert parts_of(client) == dict.fromkeys((part.name for part in PARTS), False)
    assert {name for name, there in series(client).items() if not there} == {"alarm", "flags"}
    assert series(client).keys() == REGISTRY.keys()
    (card, *_) = client.get("/v1/models").json["data"]
    schemas = {schema["name"]: schema["available"] for schema in card["readout_schemas"]}
    assert schemas == {name: name not in ("alarm", "flags") for name in REGISTRY}
    advice = {part["part"]: part["command"] for part in card["prepared"]}
    assert advice["alarm"] == "helmsight eval alarm --keep"


def test_what_is_measured_meanwhile_is_seen(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    client = create_app(Settings(vectors=()), engine=fake).test_client()
    fake.calibrated = Measured("d", ("alarm", "divergence"))
    assert {name for name, there in parts_of(client).items() if there} == {"alarm", "sage"}
    assert [name for name, there in series(client).items() if not there] == ["flags"]
    fake.calibrated = Measured("d", MEASURED)
    with caplog.at_level(logging.INFO, "helmsight"):
        create_app(Settings(vectors=(), journal_readouts=("alarm",)), engine=fake)
    assert "--journal-readouts" not in caplog.text


def test_an_engine_that_cannot_use_a_part_does_not_lack_it(fake: FakeEngine) -> None:
    fake.can(readouts=frozenset({"decay"}), interventions=frozenset({"sage.think"}))
    client = create_app(Settings(vectors=()), engine=fake).test_client()
    assert parts_of(client) == {"sage": False}


def test_a_runtime_that_loads_says_so_once_it_is_ready(fake: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(vectors=(), journal_readouts=("flags",))
    runtime = Runtime(settings, loader=lambda given: Serving.of(fake, given))
    create_app(settings, runtime=runtime)
    with caplog.at_level(logging.INFO, "helmsight"):
        for check in runtime.checks:
            check(Serving.of(fake, settings))
    assert "--journal-readouts flags" in caplog.text


def test_what_sage_does_without_is_said_by_preset_answer_and_journal(
    engine: steering.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(vectors=(), journal=f"sqlite:///{tmp_path / 'journal.db'}")
    client = create_app(settings, engine=engine).test_client()

    def lacks() -> dict[str, list[str]]:
        _, *presets = client.get("/v1/models").json["data"]
        return {preset["preset"]: preset["lacks"] for preset in presets}

    def think() -> dict[str, Any]:
        answer = ask(client, data_uri(), QUESTION, model="helmsight-demo@sage", max_tokens=2)
        return dict(choice_of(answer)["applied"]["sage"]["think"])

    assert not any(lacks().values())
    assert engine.mllm.calibration is not None
    known = think()
    assert (known["calibrated"], known["calibration"]) == (True, engine.mllm.calibration.digest)
    assert "warning" not in known
    monkeypatch.setattr(engine.mllm, "calibration", Calibration(engine.mllm.fingerprint))
    assert {name for name, texts in lacks().items() if texts} == {"sage", "sage.think"}
    assert "helmsight probe --calibrate-sage" in lacks()["sage"][0]
    rough = think()
    assert (rough["calibrated"], rough["calibration"]) == (False, None)
    assert "--calibrate-sage" in rough["warning"]
    newest, _ = rows_of(client, 2)
    assert newest["applied"]["sage"]["think"]["warning"] == rough["warning"]
    assert newest["calibration"] is None


def test_the_facts_of_a_model_name_the_same_parts(engine: steering.Engine) -> None:
    """Read them as `doctor` does, which starts no server."""
    local = LocalEngine(engine)
    serving = Serving.of(local, Settings(vectors=()))
    there = measured(local.capabilities, serving.store)
    assert there == {state.part.measured for state in states(serving) if state.there}
    assert VECTOR_PART in there
