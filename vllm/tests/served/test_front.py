"""Helmsight's server in front of vLLM servers: schemas, tools, interventions and streams, and one server that is killed.

The model is a small one whose chat template knows tools. Each answer is compared with that of the same server over our own
engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flask import Flask
from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from PIL import Image
from werkzeug.serving import make_server

import steering
from probes.answering.endpoint import Endpoint
from probes.vector.reliability import task_reliability, task_reliability_of
from served.chats import ASKED, LOOK, numbered
from served.models import made
from served.serving import Address, served
from server.app import create_app
from server.engine import vllm
from server.settings import Settings
from tests.families.calling import KINDS, template
from tests.probes.conftest import make_samples
from tests.server.conftest import ask, data_uri
from tests.server.engine import fronts
from tests.server.engine.test_vllm import close
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def model(work: Path) -> Path:
    folder = made("qwen2_5_vl", work / "caller")
    description, call, _ = KINDS["hermes"]
    (folder / "chat_template.jinja").write_text(template(description, call))
    return folder


@contextmanager
def front(model: Path, *urls: str) -> Iterator[Flask]:
    """Yield the application over servers, which were compared with plain transformers."""
    settings = Settings(model=str(model), engine=f"vllm={','.join(urls)}", slots=16, max_waiting=64, journal="off")  # type: ignore[arg-type]
    with fronts.front(settings) as app:
        yield app


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[steering.Engine]:
    engine = steering.Engine(steering.load(model, device="cpu"), slots=8, max_waiting=64, threads=1)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def here(model: Path, engine: steering.Engine) -> FlaskClient:
    """Return a client of the application over our own engine."""
    return create_app(Settings(model=str(model), journal="off"), engine=engine).test_client()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def url(model: Path, work: Path) -> Iterator[Address]:
    with served(model, work, "--enforce-eager") as address, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm, "KEPT", str(work / "references"))
        yield address


@pytest.fixture(scope="module")
def over_vllm(model: Path, url: Address) -> Iterator[Flask]:
    """Yield the application over a vLLM server."""
    with front(model, url) as app:
        yield app


@pytest.fixture(scope="module")
def there(over_vllm: Flask) -> FlaskClient:
    return over_vllm.test_client()


def choices_of(client: FlaskClient, name: str, **more: Any) -> list[dict[str, Any]]:
    fields = {"max_tokens": 100 if "tool" in name else 12, **ASKED[name], **more}
    response = ask(client, data_uri(), "What is at the top?", **fields)
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json["choices"]
    return choices


def without_names(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls have no names of their own, which are drawn."""
    calls = [{**call, "id": None} for call in message.get("tool_calls") or ()]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_over_our_own_engine(there: FlaskClient, here: FlaskClient, name: str) -> None:
    for got, expected in zip(choices_of(there, name), choices_of(here, name), strict=True):
        assert without_names(got["message"]) == without_names(expected["message"])
        assert got["finish_reason"] == expected["finish_reason"]
        for field in ("diagnostics", "applied", "logprobs"):
            assert close(*(without_gains(choice.get(field)) for choice in (got, expected))), field


def without_gains(value: Any) -> Any:
    """Return a report without the share of tokens that gain under Generate, which vLLM does not return."""
    if isinstance(value, dict):
        return {key: None if key == "gains" else without_gains(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("name", [name for name in ASKED if "schema" in name])
def test_answers_keep_to_a_schema(there: FlaskClient, name: str) -> None:
    (choice,) = choices_of(there, name)
    Draft202012Validator(LOOK).validate(json.loads(choice["message"]["content"]))
    assert choice["finish_reason"] == "stop"


def test_calls_keep_to_their_parameters(there: FlaskClient) -> None:
    (choice,) = choices_of(there, "a named tool", parallel_tool_calls=False)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    Draft202012Validator(LOOK).validate(json.loads(call["function"]["arguments"]))


def test_streams_of_calls_add_up(there: FlaskClient) -> None:
    (whole,) = choices_of(there, "some tool")
    fields = {**ASKED["some tool"], "max_tokens": 100, "stream": True}
    events = [json.loads(line[6:]) for line in ask(there, data_uri(), "What is at the top?", **fields).text.splitlines()
              if line.startswith("data: {")]  # fmt: skip
    arguments: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                arguments[piece["index"]] = arguments.get(piece["index"], "") + piece["function"].get("arguments", "")
    assert [*arguments.values()] == [call["function"]["arguments"] for call in whole["message"]["tool_calls"]]


def test_probes_measure_through_the_server(over_vllm: Flask, engine: steering.Engine) -> None:
    rng = np.random.default_rng(5)
    samples = [
        replace(
            sample, image=Image.fromarray(rng.integers(0, 255, (56, 56, 3), np.uint8)), context=f"{'So ' * i}it is."
        )
        for i, sample in enumerate(make_samples(3))
    ]
    server = make_server("127.0.0.1", 0, over_vllm, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_port}", source="probe")
    measured = task_reliability_of(endpoint, samples, quiet=True)
    server.shutdown()
    server.server_close()
    expected = task_reliability(engine, samples, quiet=True)
    assert measured.keys() == expected.keys()
    for task, reliability in measured.items():
        assert close(reliability.to_json(), expected[task].to_json())


def test_the_catalogue_names_the_engine(there: FlaskClient) -> None:
    card = there.get("/v1/models").json["data"][0]
    assert card["engine"].startswith("vLLM 0.")
    assert "sage.see" in card["unsupported"]


def test_a_model_with_recurrent_layers_is_served_without_contrasts(work: Path) -> None:
    folder = made("lfm2_vl", work / "recurrent")
    own = steering.Engine(steering.load(folder, device="cpu"), slots=4, threads=1)
    here = create_app(Settings(model=str(folder), journal="off"), engine=own).test_client()  # type: ignore[arg-type]
    own.start()
    with served(folder, work, "--enforce-eager") as url, front(folder, url) as app:
        there = app.test_client()
        fields = {"max_tokens": 12, "temperature": 0, "diagnostics": {"include": ["decay", "drift"]}}
        for more in (
            {},
            {"steering": {"toward": "text", "strength": 1.0}},
            {"sage": {"see": None, "think": {}, "generate": None}},
        ):
            got, expected = (
                ask(client, data_uri(), "What is at the top?", **fields, **more) for client in (there, here)
            )
            assert got.status_code == expected.status_code == 200, got.text
            (got,), (expected,) = got.json["choices"], expected.json["choices"]
            assert got["message"] == expected["message"]
            assert close(got["diagnostics"], expected["diagnostics"], 5e-3)
        refused = ask(there, data_uri(), "What is at the top?", contrast={"kind": "vcd"})
        assert refused.status_code == 400
        assert refused.json["error"]["param"] == "contrast.kind"
    own.stop()


def test_answers_of_a_killed_server_come_from_another(model: Path, work: Path, url: Address, here: FlaskClient) -> None:
    with served(model, work, "--enforce-eager") as other, front(model, url, other) as app:
        engine: Any = app.extensions["helmsight"].runtime.loaded.engine
        servers = {server.url: server for server in engine._client.servers}
        wait_for(lambda: all(server.well for server in servers.values()))
        begun = threading.Event()

        def answer(number: int) -> list[dict[str, Any]]:
            begun.set()
            parts, fields = numbered(number)
            response = ask(app.test_client(), *parts, **fields)
            assert response.status_code == 200, response.text
            return [choice["message"] for choice in response.json["choices"]]

        with ThreadPoolExecutor(24) as threads:
            pending = [threads.submit(answer, number) for number in range(24)]
            wait_for(lambda: servers[other].running > 2)
            other.kill()
            got = [one.result() for one in pending]
        assert not servers[other].well
        assert app.test_client().get("/ready").status_code == 200
        assert "helmsight_engine_servers_ready 1.0" in app.test_client().get("/metrics").text
    for number, messages in enumerate(got):
        parts, fields = numbered(number)
        response = ask(here, *parts, **fields)
        assert messages == [choice["message"] for choice in response.json["choices"]], number
