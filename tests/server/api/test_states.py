"""Hidden states over HTTP: within the answer, and as files of their own where they are large."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import torch
from flask.testing import FlaskClient
from PIL import Image
from safetensors.torch import load

import steering
from server.app import create_app
from server.requests import answer_files
from server.requests.answer_files import AnswerFiles
from server.settings import Settings
from tests.server.access.conftest import KeyFile
from tests.server.conftest import ask, data_uri

QUESTION = "What is it?"


def plain_states(engine: steering.Engine) -> torch.Tensor:
    """Return the states (layers, d) that the engine's own prompt state has."""
    picture = {"type": "image", "image": Image.new("RGB", (84, 84), "red")}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]
    (result,) = engine.generate([steering.Request(chat, steering.Sampling(max_tokens=1), states=True)])
    states = result.choices[0].states
    assert states is not None
    return states


def test_states_are_in_the_answer(client: FlaskClient, engine: steering.Engine) -> None:
    wanted = {"include": ["states"], "states": {"layers": [2, 5], "positions": "last"}}
    answer = ask(client, data_uri(), QUESTION, max_tokens=1, diagnostics=wanted).json
    report = answer["choices"][0]["diagnostics"]["states"]
    assert (report["layers"], report["shape"], report["dtype"]) == ([2, 5], [2, 1, engine.mllm.hidden_size], "float32")
    states = load(b64decode(report["safetensors"]))["states"]
    torch.testing.assert_close(states[:, 0], plain_states(engine)[[2, 5]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_large_states_are_fetched_by_their_name(
    stream: bool, client: FlaskClient, engine: steering.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_files, "INLINE", 1000)
    asked: dict[str, Any] = {"max_tokens": 1, "diagnostics": {"include": ["states"]}, "baseline": True}
    response = ask(client, data_uri(), QUESTION, steering={"strength": 0.5}, stream=stream, **asked)
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        (choice,) = [event["choices"][0] for event in events if event["choices"][0].get("diagnostics")]
    else:
        (choice,) = response.json["choices"]
    report, baseline = (one["diagnostics"]["states"] for one in (choice, choice["baseline"]))
    assert report["safetensors"] is baseline["safetensors"] is None
    assert {report["file"], baseline["file"]} == {report["file"], f"{report['file']}-baseline"}
    states, without = (load(client.get(f"/v1/states/{one['file']}").data)["states"] for one in (report, baseline))
    torch.testing.assert_close(without[:, 0], plain_states(engine), rtol=1e-4, atol=1e-4)
    assert list(states.shape) == report["shape"]
    assert (states - without).abs().max() > 0.1


def test_a_key_fetches_its_own_alone(engine: steering.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_files, "INLINE", 1000)
    keys = KeyFile(tmp_path / "keys.json")
    mine, other = keys.add("mine", "use"), keys.add("other", "use")
    client = create_app(Settings(named_key_file=str(keys.path)), engine=engine).test_client()
    asked = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 1,
        "diagnostics": {"include": ["states"]},
    }
    answer: Any = client.post("/v1/chat/completions", json=asked, headers=mine).json
    path = f"/v1/states/{answer['choices'][0]['diagnostics']['states']['file']}"
    assert client.get(path, headers=mine).status_code == 200
    assert client.get(path, headers=other).status_code == 404
    assert client.get(f"{path}x", headers=mine).json["error"]["code"] == "unknown_file"  # type: ignore[index]


def test_too_many_states_are_refused(client: FlaskClient) -> None:
    response = ask(client, QUESTION, diagnostics={"include": ["states"], "states": {"positions": [0]}})
    assert (response.status_code, response.json["error"]["param"]) == (400, "diagnostics.states.positions")


def test_options_of_a_readout_that_is_not_included_are_refused(client: FlaskClient) -> None:
    response = ask(client, QUESTION, diagnostics={"include": ["focus"], "states": {"layers": [1]}})
    error = response.json["error"]
    assert (response.status_code, error["param"]) == (400, "diagnostics.states")
    assert error["message"] == "'diagnostics.states' goes with 'states' in 'diagnostics.include'."


def test_an_option_alone_asks_for_its_readout(client: FlaskClient) -> None:
    """README's row."""
    response = ask(client, QUESTION, diagnostics={"states": {"layers": [5], "positions": "last"}})
    diagnostics = response.json["choices"][0]["diagnostics"]
    assert diagnostics["states"]["layers"] == [5]
    assert diagnostics.keys() > {"states", "modality"}, "beside those of `true`"


def test_the_oldest_files_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_files, "KEPT_BYTES", 10)
    files = AnswerFiles()
    for name in "abc":
        files.keep(name, "owner", b"1234")
    assert [files.find(name, "owner") for name in "abc"] == [None, b"1234", b"1234"]
    assert files.find("b", "another") is None
