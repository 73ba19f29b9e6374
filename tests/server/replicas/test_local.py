"""Front and replica with Ray Serve's own handles between them, in one process: Ray's local testing mode has no cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

pytest.importorskip("ray.serve")

from ray import serve

from server.replicas.application import replicas
from server.replicas.front import Front
from server.replicas.replica import Replica
from server.settings import Settings
from tests.forked import forked
from tests.server.conftest import data_uri, user
from tests.server.replicas.test_front import through
from tests.steering.parallel.asking import differences

BODY = {"messages": [user(data_uri(), "Describe the picture.")], "max_tokens": 6, "temperature": 0, "diagnostics": True}
REFUSED = {"messages": [user("?")], "max_tokens": 0}


def answers() -> list[tuple[int, str]]:
    """Return the answers of a front whose replica has loaded the embedded model, and those while it drains."""
    settings = Settings(slots=4, journal="off", vectors=(), threads=1, replicas=1, compiled=False, allow_host=("x",))
    behind = serve.deployment(Replica, **replicas(settings, 0)).bind(settings, 1)
    handle: Any = serve.run(behind, _local_testing_mode=True)
    front = Front(handle, settings)

    def ask(body: dict[str, Any]) -> Any:
        return through(front, body=json.dumps(body).encode(), headers=[(b"content-type", b"application/json")])

    answered = [ask(body) for body in (BODY, {**BODY, "stream": True}, REFUSED)]
    handle.drain.remote().result(timeout_s=30)
    answered.append(ask(BODY))
    return [(status, body.decode()) for status, _, body in answered]


def test_a_replica_answers_through_its_handle_as_one_process_does(client: FlaskClient, tmp_path: Path) -> None:
    said, log = tmp_path / "said.json", tmp_path / "log"
    with forked(lambda: said.write_text(json.dumps(answers())), log) as process:
        process.join(120)
    assert process.exitcode == 0, log.read_text()[-4000:]
    whole, streamed, refused, draining = json.loads(said.read_text())
    alone = [client.post("/v1/chat/completions", json=body) for body in (BODY, REFUSED)]
    expected = alone[0].get_json()
    assert whole[0] == 200
    assert differences(expected["choices"], json.loads(whole[1])["choices"]) == []
    events = [line.removeprefix("data: ") for line in streamed[1].splitlines() if line.startswith("data: ")]
    assert (streamed[0], events[-1]) == (200, "[DONE]")
    chunks = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert (
        "".join(chunk["delta"].get("content") or "" for chunk in chunks) == expected["choices"][0]["message"]["content"]
    )
    assert (refused[0], json.loads(refused[1])["error"]["code"]) == (400, alone[1].get_json()["error"]["code"])
    assert (draining[0], json.loads(draining[1])["error"]["code"]) == (503, "model_draining")
