"""The life of a vector: uploaded, listed, used, fetched and deleted, while others ask."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient

import steering
from server.vectors import registry as registry_module
from steering import SteeringVector
from tests.server.conftest import ask, data_uri, user
from tests.server.vectors.uploads import BINARY, QUESTION, ROUTE, MakeVector, problem, upload

# --- the life of a vector --------------------------------------------------------------------------------------------


def test_a_vector_is_uploaded_listed_used_fetched_and_deleted(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path
) -> None:
    vector = make_vector()
    made = upload(open_client, vector)
    assert (made.status_code, made.headers["Location"]) == (201, f"{ROUTE}/mine")
    assert made.json == open_client.get(f"{ROUTE}/mine").json
    assert (made.json["name"], made.json["layers"], made.json["matches"]) == ("mine", [1, 2], True)
    assert made.json["info"] == {"samples": 25}
    assert "mine" in [one["name"] for one in open_client.get(ROUTE).json["data"]]
    assert "mine" in open_client.get("/v1/models").json["data"][0]["vectors"]

    answer = ask(open_client, data_uri(), QUESTION, steering={"vector": "mine"})
    assert answer.json["choices"][0]["applied"]["steering"][0]["name"] == "mine"

    file = open_client.get(f"{ROUTE}/mine/file")
    assert (file.status_code, file.mimetype) == (200, BINARY)
    assert file.headers["Content-Disposition"] == 'attachment; filename="mine.safetensors"'
    assert file.data == (folder / "mine.safetensors").read_bytes()
    assert torch.equal(SteeringVector.from_bytes(file.data).direction, vector.direction)

    gone = open_client.delete(f"{ROUTE}/mine")
    assert (gone.status_code, gone.json) == (200, {"name": "mine", "object": "steering.vector", "deleted": True})
    for route in (f"{ROUTE}/mine", f"{ROUTE}/mine/file"):
        assert problem(open_client.get(route)) == (404, "unknown_vector", "name")
    assert problem(open_client.delete(f"{ROUTE}/mine")) == (404, "unknown_vector", "name")
    assert problem(ask(open_client, steering={"vector": "mine"})) == (400, "unknown_vector", "steering.vector")


def test_a_vector_may_be_given_another_name_and_be_replaced(open_client: FlaskClient, make_vector: MakeVector) -> None:
    first, second = make_vector(), make_vector(seed=2)
    assert upload(open_client, first, "?name=other").json["name"] == "other"
    assert problem(open_client.get(f"{ROUTE}/mine")) == (404, "unknown_vector", "name")
    assert problem(upload(open_client, second, "?name=other")) == (409, "vector_exists", "name")
    assert problem(upload(open_client, second, "?name=other&replace=false")) == (409, "vector_exists", "name")
    stored = SteeringVector.from_bytes(open_client.get(f"{ROUTE}/other/file").data)
    assert (stored.name, torch.equal(stored.direction, first.direction)) == ("other", True)
    assert upload(open_client, second, "?name=other&replace=true").status_code == 201
    stored = SteeringVector.from_bytes(open_client.get(f"{ROUTE}/other/file").data)
    assert torch.equal(stored.direction, second.direction)


def test_other_processes_see_changes_at_once(
    open_client: FlaskClient, make_app: Callable[..., Flask], make_vector: MakeVector, folder: Path
) -> None:
    other = make_app(allow_uploads=False).test_client()
    assert other.get(f"{ROUTE}/mine").status_code == 404
    upload(open_client, make_vector())
    assert other.get(f"{ROUTE}/mine").json["info"] == {"samples": 25}
    upload(open_client, make_vector(info={"samples": 26}), "?replace=true")
    assert other.get(f"{ROUTE}/mine").json["info"] == {"samples": 26}
    # One that needs no torch, which would take it long to import
    code = "import sys; from safetensors import safe_open; print(safe_open(sys.argv[1], 'np').metadata()['info'])"
    command = [sys.executable, "-c", code, str(folder / "mine.safetensors")]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    assert json.loads(told.stdout) == {"samples": 26}
    open_client.delete(f"{ROUTE}/mine")
    assert other.get(f"{ROUTE}/mine").status_code == 404


def test_the_folder_is_made_for_its_owner_alone(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path
) -> None:
    assert problem(open_client.delete(f"{ROUTE}/mine")) == (404, "unknown_vector", "name")
    assert not folder.exists()
    upload(open_client, make_vector())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "mine.safetensors"]


def test_running_requests_keep_the_vector_that_they_began_with(
    open_client: FlaskClient, make_vector: MakeVector, engine: steering.Engine
) -> None:
    upload(open_client, make_vector())
    fields: dict[str, Any] = {
        "steering": {"vector": "mine", "toward": "text", "strength": 3.0},
        "logit_bias": dict.fromkeys(map(str, engine.mllm.stop_ids), -100),
        "max_tokens": 40,
    }

    def answer() -> str:
        return str(ask(open_client, data_uri(), QUESTION, **fields).json["choices"][0]["message"]["content"])

    def streamed(change: Callable[[], Any]) -> str:
        """Return the stream of an answer during which something changes."""
        body = {"messages": [user(data_uri(), QUESTION)], "temperature": 0, "stream": True, **fields}
        pieces = iter(open_client.post("/v1/chat/completions", json=body).response)
        lines = [next(pieces) for _ in range(3)]
        assert change().status_code < 300
        lines += list(pieces)
        text = "".join(line.decode() if isinstance(line, bytes) else line for line in lines)
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])

    before = answer()
    assert streamed(lambda: upload(open_client, make_vector(seed=5), "?replace=true")) == before
    after = answer()
    assert after != before
    assert streamed(lambda: open_client.delete(f"{ROUTE}/mine")) == after


# --- disks and neighbours --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (errno.ENOSPC, 507, "storage_full"),
        (errno.EDQUOT, 507, "storage_full"),
        (errno.EIO, 500, "storage_failed"),
    ],
)
def test_a_full_or_broken_disk_leaves_what_was_there(
    function: str, number: int, status: int, code: str, open_client: FlaskClient, make_vector: MakeVector,
    folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    upload(open_client, make_vector())
    before = (folder / "mine.safetensors").read_bytes()

    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number), str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        for query in ("?name=other", "?replace=true"):
            response = upload(open_client, make_vector(seed=2), query)
            assert problem(response) == (status, code, None)
            assert str(folder) not in response.text
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "mine.safetensors"]
    assert (folder / "mine.safetensors").read_bytes() == before
    assert upload(open_client, make_vector(seed=2), "?replace=true").status_code == 201


def test_a_folder_that_is_a_file_is_a_clear_error(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path
) -> None:
    folder.write_text("in the way")
    assert problem(upload(open_client, make_vector())) == (500, "storage_failed", None)
    assert folder.read_text() == "in the way"


def test_what_killed_writers_left_is_removed_once_it_is_old(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path
) -> None:
    upload(open_client, make_vector())
    old, new = folder / ".mine.safetensors.old", folder / ".mine.safetensors.new"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert [one["name"] for one in open_client.get(ROUTE).json["data"]].count("mine") == 1
    assert upload(open_client, make_vector("second")).status_code == 201
    assert (old.exists(), new.exists()) == (False, True)


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path
) -> None:
    upload(open_client, make_vector())
    (folder / "broken.safetensors").mkdir()
    listed = {one["name"]: one for one in open_client.get(ROUTE).json["data"]}
    assert listed["broken"]["error"] == "The file cannot be read: Is a directory."
    assert listed["mine"]["matches"] is True
    assert problem(open_client.get(f"{ROUTE}/broken")) == (500, "storage_failed", None)
    assert problem(open_client.delete(f"{ROUTE}/broken")) == (500, "storage_failed", None)


@contextmanager
def held_by_another(folder: Path) -> Iterator[None]:
    """Hold the lock as another process would."""
    with (folder / registry_module.LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_lock_that_is_never_released_is_not_waited_for_for_ever(
    open_client: FlaskClient, make_vector: MakeVector, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "PATIENCE", 0.1)
    upload(open_client, make_vector())
    with held_by_another(folder):
        responses = [upload(open_client, make_vector("b")), open_client.delete(f"{ROUTE}/mine")]
        assert open_client.get(f"{ROUTE}/mine").status_code == 200
    for response in responses:
        assert problem(response) == (503, "registry_busy", "name")
        assert int(response.headers["Retry-After"]) >= 1
    assert open_client.delete(f"{ROUTE}/mine").status_code == 200


def test_concurrent_uploads_deletes_and_lookups(
    make_app: Callable[..., Flask], make_vector: MakeVector, folder: Path
) -> None:
    """Two applications, as two processes; every lookup sees a whole vector or none, and the bound holds."""
    apps = [make_app(max_uploaded_vectors=3) for _ in range(2)]
    contents = [make_vector(seed=seed).to_bytes() for seed in range(4)]
    statuses: set[tuple[str, int]] = set()
    most = 0

    def work(number: int) -> None:
        nonlocal most
        client = apps[number % 2].test_client()
        for step in range(15):
            name = f"v{(number + step) % 5}"
            made = upload(client, contents[number], f"?name={name}&replace={'true' if step % 2 else 'false'}")
            most = max(most, len(list(folder.glob("*.safetensors"))))
            shown = client.get(f"{ROUTE}/{name}")
            file = client.get(f"{ROUTE}/{name}/file")
            if file.status_code == 200:
                SteeringVector.from_bytes(file.data)
            gone = client.delete(f"{ROUTE}/{name}")
            answers = {"made": made, "shown": shown, "file": file, "gone": gone}
            statuses.update((what, answer.status_code) for what, answer in answers.items())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    allowed = {"made": {201, 409}, "shown": {200, 404}, "file": {200, 404}, "gone": {200, 404}}
    assert all(status in allowed[what] for what, status in statuses), statuses
    assert ("made", 201) in statuses
    assert most <= 3
    assert not [path for path in folder.iterdir() if path.name.startswith(".v")]
