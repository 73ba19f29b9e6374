"""The registry of vectors: uploaded, listed, fetched and deleted while others ask; what is wrong is refused by name."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient
from pydantic import SecretStr
from safetensors.torch import load, save

import steering
from server.app import create_app
from server.settings import Settings
from server.vectors import registry as registry_module
from steering import SteeringVector
from tests.server.conftest import ask, data_uri

ROUTE = "/v1/steering/vectors"
QUESTION = "What colour is it?"
BINARY = "application/octet-stream"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of uploads, which does not exist yet."""
    return tmp_path / "uploads"


@pytest.fixture
def make_app(engine: steering.Engine, vectors: Path, folder: Path) -> Callable[..., Flask]:
    """An application that takes uploads, beside a folder with vectors that is only read."""

    def make(**changes: Any) -> Flask:
        options: dict[str, Any] = {"vectors": (str(folder), str(vectors)), "allow_uploads": True} | changes
        return create_app(Settings(slots=4, max_waiting=8, **options), engine=engine)

    return make


@pytest.fixture
def open_client(make_app: Callable[..., Flask]) -> FlaskClient:
    """A client of an application that takes uploads."""
    return make_app().test_client()


@pytest.fixture
def make_vector(engine: steering.Engine) -> Callable[..., SteeringVector]:
    """A random vector for the model."""

    def make(name: str = "mine", seed: int = 1, **changes: Any) -> SteeringVector:
        shape = engine.mllm.num_layers, engine.mllm.hidden_size
        fields: dict[str, Any] = {
            "name": name,
            "direction": torch.randn(shape, generator=torch.Generator().manual_seed(seed)),
            **{key: torch.ones(shape[0]) for key in ("weight", "mean_abs", "std")},
            "layers": (1, 2),
            "fingerprint": engine.mllm.fingerprint,
            "info": {"samples": 25},
        }
        return SteeringVector(**fields | changes)

    return make


MakeVector = Callable[..., SteeringVector]


def upload(client: FlaskClient, vector: SteeringVector | bytes, query: str = "", kind: str = BINARY) -> Any:
    data = vector if isinstance(vector, bytes) else vector.to_bytes()
    return client.post(ROUTE + query, data=data, content_type=kind)


def problem(response: Any) -> tuple[int, str, str | None]:
    return response.status_code, response.json["error"]["code"], response.json["error"]["param"]


def metadata_of(data: bytes) -> dict[str, str]:
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])


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
    code = f"import steering; print(steering.VectorStore({str(folder)!r}).get('mine').info)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "{'samples': 26}\n"
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


@pytest.mark.parametrize("change", ["delete", "replace"])
def test_a_running_request_keeps_the_vector_it_began_with(
    change: str, open_client: FlaskClient, make_vector: MakeVector, engine: steering.Engine
) -> None:
    upload(open_client, make_vector())
    fields: dict[str, Any] = {
        "steering": {"vector": "mine", "toward": "text", "strength": 3.0},
        "logit_bias": dict.fromkeys(map(str, engine.mllm.stop_ids), -100),
        "max_tokens": 64,
    }
    before = ask(open_client, data_uri(), QUESTION, **fields).json["choices"][0]["message"]["content"]
    body = {"messages": [{"role": "user", "content": []}], "temperature": 0, "stream": True, **fields}
    body["messages"] = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_uri()}},
                {"type": "text", "text": QUESTION},
            ],
        }
    ]
    streamed = iter(open_client.post("/v1/chat/completions", json=body).response)
    lines = [next(streamed) for _ in range(3)]
    if change == "delete":
        assert open_client.delete(f"{ROUTE}/mine").status_code == 200
    else:
        upload(open_client, make_vector(seed=5), "?replace=true")
    lines += list(streamed)
    text = "".join(line.decode() if isinstance(line, bytes) else line for line in lines)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == before
    if change == "replace":
        after = ask(open_client, data_uri(), QUESTION, **fields).json["choices"][0]["message"]["content"]
        assert after != before


# --- what is refused -------------------------------------------------------------------------------------------------


def test_uploads_are_off_by_default(make_app: Callable[..., Flask], make_vector: MakeVector, folder: Path) -> None:
    assert Settings().allow_uploads is False
    client = make_app(allow_uploads=False).test_client()
    for response in (upload(client, make_vector()), client.delete(f"{ROUTE}/modality-preference")):
        assert problem(response) == (403, "uploads_disabled", None)
        assert "--allow-uploads" in response.json["error"]["message"]
    assert not folder.exists()
    assert client.get(f"{ROUTE}/modality-preference/file").status_code == 200


def test_without_a_folder_nothing_can_be_uploaded(make_app: Callable[..., Flask], make_vector: MakeVector) -> None:
    assert problem(upload(make_app(vectors=()).test_client(), make_vector())) == (403, "uploads_disabled", None)


def test_the_routes_need_the_key(make_app: Callable[..., Flask], make_vector: MakeVector, folder: Path) -> None:
    client = make_app(api_keys=(SecretStr("sk-0123456789"),)).test_client()
    for response in (
        upload(client, make_vector()),
        client.delete(f"{ROUTE}/mine"),
        client.get(f"{ROUTE}/mine/file"),
        client.post("/v1/steering/validate", json={"steering": True}),
    ):
        assert problem(response) == (401, "missing_api_key", None)
    assert not folder.exists()


def test_vectors_that_were_not_uploaded_stay(
    open_client: FlaskClient, make_vector: MakeVector, vectors: Path, folder: Path
) -> None:
    kept = (vectors / "modality-preference.safetensors").read_bytes()
    assert problem(open_client.delete(f"{ROUTE}/modality-preference")) == (403, "vector_read_only", "name")
    assert problem(upload(open_client, make_vector("modality-preference"))) == (409, "vector_exists", "name")
    refused = upload(open_client, make_vector("modality-preference"), "?replace=true")
    assert problem(refused) == (403, "vector_read_only", "name")
    assert (vectors / "modality-preference.safetensors").read_bytes() == kept
    assert not list(folder.glob("*.safetensors"))


def test_vectors_that_ship_with_the_model_stay(engine: steering.Engine, make_vector: MakeVector, folder: Path) -> None:
    app = create_app(Settings(vectors=(str(folder),), allow_uploads=True), engine=engine)
    assert problem(app.test_client().delete(f"{ROUTE}/modality-preference")) == (403, "vector_read_only", "name")


@pytest.mark.parametrize(
    "name", ["..%2fevil", "%2e%2e%2fevil", "a%2fb", "A", ".hidden", "a%00", "a%0a", "", "x" * 65, "ä", "a%20b", "a%5cb"]
)
def test_names_that_could_be_paths_are_refused(
    name: str, open_client: FlaskClient, make_vector: MakeVector, tmp_path: Path
) -> None:
    assert problem(upload(open_client, make_vector(), f"?name={name}")) == (400, "bad_vector_name", "name")
    if name:
        assert open_client.delete(f"{ROUTE}/{name}").status_code == 404
        assert open_client.get(f"{ROUTE}/{name}/file").status_code == 404
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("?nam=x", "nam", "unknown_parameter"),
        ("?replace=1", "replace", "invalid_value"),
        ("?replace=", "replace", "invalid_value"),
    ],
)
def test_a_wrong_query_names_the_parameter(
    query: str, param: str, code: str, open_client: FlaskClient, make_vector: MakeVector
) -> None:
    assert problem(upload(open_client, make_vector(), query)) == (400, code, param)


def test_damaged_files_are_refused(open_client: FlaskClient, make_vector: MakeVector, folder: Path) -> None:
    data = make_vector().to_bytes()
    flipped = bytearray(data)
    flipped[-3] ^= 1
    tensors, metadata = load(data), metadata_of(data)
    tensors["direction"][0, 0] = torch.nan
    hollow = {name: tensor for name, tensor in load(data).items() if name != "weight"}
    for wrong in (
        b"", b"PK\x03\x04", data[:-1], data[: len(data) // 2], data + b"\0", bytes(flipped),
        save(tensors, metadata), save(hollow, metadata), save(load(data), metadata | {"name": "../evil"}),
        save(load(data), metadata | {"format": "other"}), b"\xff" * 8 + data[8:],
    ):  # fmt: skip
        response = upload(open_client, wrong)
        assert response.status_code == 400
        assert response.json["error"]["code"] in ("bad_vector", "bad_vector_name")
    assert not folder.exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "x" * 10_000},
        {"format": "x" * 10_000},
        {"fingerprint": "x" * 10_000},
        {"layers": json.dumps(["x" * 10_000])},
        {"layers": json.dumps([99] * 10_000)},
        {"sha256": "x", "name": "y" * 10_000},
        {"info": '{"composed_of": ["' + "x" * 10_000 + '"]}'},
    ],
)
def test_refusals_do_not_repeat_the_file(
    changes: dict[str, str], open_client: FlaskClient, make_vector: MakeVector
) -> None:
    data = make_vector().to_bytes()
    response = upload(open_client, save(load(data), metadata_of(data) | changes))
    assert (response.status_code, len(response.data) < 1000) == (400, True)


def test_vectors_of_another_model_are_refused(
    open_client: FlaskClient, make_vector: MakeVector, engine: steering.Engine, folder: Path
) -> None:
    assert problem(upload(open_client, make_vector(fingerprint="0" * 32))) == (400, "wrong_model", None)
    narrow = make_vector(direction=torch.zeros(engine.mllm.num_layers, 3))
    assert problem(upload(open_client, narrow)) == (400, "wrong_shape", None)
    assert not folder.exists()


def test_what_a_vector_says_about_itself_is_bounded(open_client: FlaskClient, make_vector: MakeVector) -> None:
    assert problem(upload(open_client, make_vector(info={"note": "x" * 300_000}))) == (400, "bad_vector", None)
    assert problem(upload(open_client, make_vector(kind="x" * 65))) == (400, "bad_vector", None)


def test_a_header_of_many_empty_tensors_is_refused_at_once(open_client: FlaskClient, folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number:x}": entry for number in range(300_000)}).encode()
    began = time.process_time()
    response = upload(open_client, len(header).to_bytes(8, "little") + header)
    assert time.process_time() - began < 1  # measured are 0.05, and 4.4 where it is parsed
    assert problem(response) == (400, "bad_vector", None)
    assert "its header has" in response.json["error"]["message"]
    assert not folder.exists()


def test_only_what_was_checked_is_stored(open_client: FlaskClient, make_vector: MakeVector, folder: Path) -> None:
    data = make_vector().to_bytes()
    padded = save(load(data) | {"padding": torch.zeros(10_000)}, metadata_of(data) | {"more": "x" * 1000})
    assert upload(open_client, padded).status_code == 201
    assert set(load((folder / "mine.safetensors").read_bytes())) == {"direction", "weight", "mean_abs", "std"}
    assert (folder / "mine.safetensors").stat().st_size < len(padded) / 2


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x", ""])
def test_other_media_types_are_refused(kind: str, open_client: FlaskClient, make_vector: MakeVector) -> None:
    assert problem(upload(open_client, make_vector(), kind=kind)) == (415, "unsupported_media_type", None)


def test_a_safetensors_media_type_is_fine(open_client: FlaskClient, make_vector: MakeVector) -> None:
    assert upload(open_client, make_vector(), kind="application/safetensors").status_code == 201


def test_compressed_bodies_are_refused(open_client: FlaskClient, make_vector: MakeVector) -> None:
    headers = {"Content-Encoding": "gzip"}
    response = open_client.post(ROUTE, data=make_vector().to_bytes(), content_type=BINARY, headers=headers)
    assert problem(response) == (415, "unsupported_media_type", None)


def test_the_size_has_a_bound_of_its_own(make_app: Callable[..., Flask], make_vector: MakeVector) -> None:
    data = make_vector().to_bytes()
    # Larger than what other routes take.
    assert upload(make_app(max_body=1024).test_client(), data).status_code == 201
    client = make_app(max_vector_bytes=len(data) - 1).test_client()
    response = upload(client, data, "?name=second")
    assert problem(response) == (413, "request_entity_too_large", None)
    assert str(len(data) - 1) in response.json["error"]["message"]
    # A body that does not say how long it is.
    chunked = {"wsgi.input": io.BytesIO(data), "wsgi.input_terminated": True}
    response = client.post(ROUTE, content_type=BINARY, environ_overrides=chunked, headers={"Content-Length": ""})
    assert problem(response) == (413, "request_entity_too_large", None)
    assert upload(make_app(max_vector_bytes=len(data)).test_client(), data, "?name=second").status_code == 201


def test_the_number_is_bounded(make_app: Callable[..., Flask], make_vector: MakeVector) -> None:
    client = make_app(max_uploaded_vectors=2).test_client()
    for name in ("a", "b"):
        assert upload(client, make_vector(), f"?name={name}").status_code == 201
    response = upload(client, make_vector(), "?name=c")
    assert problem(response) == (409, "too_many_vectors", "name")
    assert "at most 2" in response.json["error"]["message"]
    assert upload(client, make_vector(seed=2), "?name=b&replace=true").status_code == 201
    client.delete(f"{ROUTE}/a")
    assert upload(client, make_vector(), "?name=c").status_code == 201


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


# --- the dry run -----------------------------------------------------------------------------------------------------


def validate(client: FlaskClient, **body: Any) -> Any:
    return client.post("/v1/steering/validate", json=body)


def test_a_dry_run_says_what_would_be_applied(
    open_client: FlaskClient, make_vector: MakeVector, engine: steering.Engine
) -> None:
    ones = torch.ones(engine.mllm.num_layers, engine.mllm.hidden_size)
    vector = make_vector(
        direction=ones * 0.5,
        weight=torch.full((engine.mllm.num_layers,), 3.0),
        mean_abs=torch.full((engine.mllm.num_layers,), 0.25),
        info={"calibration": {"range": [0.5, 1.5]}},
    )
    upload(open_client, vector)
    response = validate(open_client, steering={"vector": "mine", "strength": 2, "apply": {"tokens": "image"}})
    assert response.status_code == 200
    norm = 3.0 * engine.mllm.hidden_size**0.5
    added = [{"layer": layer, "norm": pytest.approx(norm), "largest": 3.0, "relative": 12.0} for layer in (1, 2)]
    assert response.json == {
        "object": "steering.validation",
        "model": engine.mllm.name,
        "steering": [
            {
                "name": "mine",
                "toward": "vision",
                "strength": 2.0,
                "published": None,
                "scale": -2.0,
                "layers": [1, 2],
                "apply": {"tokens": "image"},
                "calibrated_range": [0.5, 1.5],
                "warning": "strength 2 is beyond the calibrated range 0.5 to 1.5",
                "added": added,
            }
        ],
    }
    # As a chat reports it.
    answer = ask(
        open_client, data_uri(), QUESTION, steering={"vector": "mine", "strength": 2, "apply": {"tokens": "image"}}
    )
    (applied,) = answer.json["choices"][0]["applied"]["steering"]
    shared = applied.keys() & response.json["steering"][0].keys()
    assert shared >= {"name", "toward", "strength", "scale", "layers", "apply", "warning"}
    assert all(applied[key] == response.json["steering"][0][key] for key in shared)


def test_a_dry_run_of_several_vectors_and_of_none(open_client: FlaskClient) -> None:
    named = {"name": "modality-preference", "scale": -0.5, "layers": [2]}
    response = validate(open_client, steering={"vectors": [named, {**named, "scale": 1.0}]})
    assert [(one["scale"], one["toward"], one["layers"]) for one in response.json["steering"]] == [
        (-0.5, None, [2]),
        (1.0, None, [2]),
    ]
    for nothing in (False, None, {"vectors": []}):
        assert validate(open_client, steering=nothing).json["steering"] == []


def test_a_dry_run_leaves_the_way_of_auto_open(open_client: FlaskClient) -> None:
    (report,) = validate(open_client, steering={"toward": "auto", "strength": 0.5}).json["steering"]
    assert (report["toward"], report["strength"], report["scale"]) == ("auto", 0.5, None)
    surprise = {"toward": "auto", "auto": {"criterion": "surprise", "bound": 2.0, "one_degraded": True}}
    assert validate(open_client, steering=surprise).status_code == 200
    for auto in ({"bound": 2.0}, {"criterion": "surprise", "bound": -1}):
        refused = validate(open_client, steering={"toward": "auto", "auto": auto})
        assert (refused.status_code, problem(refused)[2]) == (400, "steering.auto.bound")


def test_a_dry_run_takes_a_whole_chat_request_and_counts_its_images(open_client: FlaskClient) -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://host.invalid/a.png"}}] * 2
    messages = [{"role": "user", "content": content}]
    for number, status in ((2, 200), (3, 400)):
        steering = {"apply": {"tokens": f"image:{number}"}}
        assert validate(open_client, steering=steering, messages=messages).status_code == status
    assert problem(validate(open_client, steering=steering, messages=messages))[2] == "steering.apply.tokens"
    assert validate(open_client, steering=steering).status_code == 200


# ------------------------------------------------------------------------------------------ strength in published units


@pytest.fixture
def calibrated(make_vector: MakeVector, engine: steering.Engine) -> SteeringVector:
    """A vector whose strength 1 is 0.4 published: it adds 0.4 of the states' magnitude at layer 3."""
    weight = 0.4 * steering.magnitudes(engine)
    info = {"calibration": {"range": [0.5, 1.0], "factor": 0.4}}
    vector = make_vector(weight=weight, layers=(3,), info=info)
    return replace(vector, direction=torch.ones_like(vector.direction))


def test_a_strength_is_told_in_both_units(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    shown = upload(open_client, calibrated).json
    assert shown["published"] == pytest.approx(0.4)
    for body in ({"vector": "mine", "strength": 2.0}, {"vectors": [{"name": "mine", "scale": -2.0}]}):
        (planned,) = validate(open_client, steering=body).json["steering"]
        (applied,) = ask(open_client, data_uri(), QUESTION, steering=body).json["choices"][0]["applied"]["steering"]
        for report in (planned, applied):
            assert (report["strength"], report["published"]) == (2.0, pytest.approx(0.8))
            assert report["warning"] == "strength 2 is beyond the calibrated range 0.5 to 1"  # in the vector's own unit


def test_the_limit_is_in_published_units(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    limits = open_client.get("/v1/models").json["data"][0]["limits"]
    assert (limits["strength"], limits["strength_unit"]) == (4.0, "published")
    upload(open_client, calibrated)
    for strength, status in ((7.5, 200), (10.0, 200), (10.01, 400)):  # 3, 4 and a little more than 4 published
        response = validate(open_client, steering={"vector": "mine", "strength": strength})
        assert response.status_code == status, strength
    assert problem(response) == (400, "steering_strength_exceeded", "steering.strength")
    said = "must be at most 10 in size for 'mine', whose strength 1 is 0.4 in published units (at most 4)"
    assert said in response.json["error"]["message"]


def test_toward_is_kept_by_a_vector_that_was_negated(open_client: FlaskClient, calibrated: SteeringVector) -> None:
    upload(open_client, (-0.5 * calibrated).named("half"))
    shown = open_client.get(f"{ROUTE}/half").json
    assert (shown["kind"], shown["positive"]) == ("modality-preference", "vision")
    upload(open_client, calibrated)
    assert open_client.get(f"{ROUTE}/mine").json["positive"] == "text"
    for toward, scale in (("text", -2.0), ("vision", 2.0)):
        body = {"vector": "half", "toward": toward, "strength": 2}
        answer = ask(open_client, data_uri(), QUESTION, steering=body)
        (applied,) = answer.json["choices"][0]["applied"]["steering"]
        assert (applied["toward"], applied["scale"], applied["published"]) == (toward, scale, pytest.approx(0.4))
        assert validate(open_client, steering=body).json["steering"][0]["scale"] == scale
        counted = f'helmsight_interventions_total{{kind="steer",toward="{toward}"}} 1.0'
        assert counted in open_client.get("/metrics").text
        whole = ask(open_client, data_uri(), QUESTION, steering={"vector": "mine", "toward": toward})
        assert answer.json["choices"][0]["message"] == whole.json["choices"][0]["message"]
        assert applied["dose"] == pytest.approx(whole.json["choices"][0]["applied"]["steering"][0]["dose"])


def test_toward_is_refused_for_a_vector_of_which_nobody_knows_the_side(
    open_client: FlaskClient, calibrated: SteeringVector, make_vector: MakeVector
) -> None:
    upload(open_client, (calibrated - 0.001 * make_vector("other", seed=9)).named("mix"))
    for toward in ("text", "vision", "auto"):
        steering = {"vector": "mix", "toward": toward}
        for response in (
            validate(open_client, steering=steering),
            ask(open_client, data_uri(), "x", steering=steering),
        ):
            assert problem(response) == (400, "not_a_preference", "steering.vector")
            assert "a signed 'scale' in 'steering.vectors'" in response.json["error"]["message"]
    assert validate(open_client, steering={"vectors": [{"name": "mix", "scale": -1.0}]}).status_code == 200


@pytest.mark.parametrize("parts", [[6.0, 6.0], [4.0, -4.0, 4.0]])
def test_naming_a_vector_several_times_does_not_get_past_the_limit(
    parts: list[float], open_client: FlaskClient, calibrated: SteeringVector
) -> None:
    upload(open_client, calibrated)
    named = [{"name": "mine", "scale": scale} for scale in parts]
    assert problem(validate(open_client, steering={"vectors": named}))[1:] == (
        "steering_strength_exceeded", "steering.vectors",
    )  # fmt: skip


@pytest.mark.parametrize(
    "forge",
    [
        lambda vector: (100.0 * vector).named("mine"),  # scaled up: told in published units, and refused by them
        lambda vector: replace(vector, weight=100 * vector.weight),  # which its metadata do not tell
        lambda vector: replace(vector, direction=100 * vector.direction, info={"published": 0.4}),
        lambda vector: replace(vector, weight=100 * vector.weight, info={"published": 1e-9}),
        lambda vector: replace(vector, weight=100 * vector.weight, info={}),
        lambda vector: replace(vector, weight=100 * vector.weight, mean_abs=100 * vector.mean_abs, info={}),
    ],
)
def test_a_vector_that_was_scaled_up_does_not_get_past_the_limit(
    forge: Callable[[SteeringVector], SteeringVector],
    open_client: FlaskClient,
    calibrated: SteeringVector,
) -> None:
    """100 times 0.4 of the states' magnitude is 40; a tenth of its strength is allowed again."""
    assert upload(open_client, forge(calibrated)).status_code == 201
    for steer in (
        {"vector": "mine", "strength": 1},
        {"vector": "mine", "toward": "auto"},
        {"vectors": [{"name": "mine"}]},
    ):
        for response in (
            validate(open_client, steering=steer),
            ask(open_client, data_uri(), "Text context: a\nb", steering=steer),
        ):
            assert problem(response)[:2] == (400, "steering_strength_exceeded")
    assert validate(open_client, steering={"vector": "mine", "strength": 0.09}).status_code == 200


def test_vectors_of_several_names_do_not_get_past_the_limit_together(
    open_client: FlaskClient, calibrated: SteeringVector
) -> None:
    """Each is asked for at 3.2 published, together they would add 6.4 times what the states have."""
    for name in ("one", "two"):
        upload(open_client, calibrated.named(name))
    named = [{"name": name, "scale": 8.0} for name in ("one", "two")]
    response = validate(open_client, steering={"vectors": named})
    assert problem(response)[1:] == ("steering_strength_exceeded", "steering.vectors")
    assert "times the mean magnitude of the model's states at layer 3" in response.json["error"]["message"]
    assert validate(open_client, steering={"vectors": [{**one, "scale": 4.0} for one in named]}).status_code == 200


@pytest.mark.parametrize(
    "steering",
    [
        {"vector": "nobody"},
        {"vector": "../modality-preference"},
        {"vector": "damaged"},
        {"vector": "stranger"},
        {"strength": 4.1},
        {"strength": -1},
        {"strength": "much"},
        {"toward": "left"},
        {"layers": [99]},
        {"layers": [1, 1]},
        {"apply": {"tokens": "some"}},
        {"apply": {"tokens": "image:0"}},
        {"apply": {"token": "all"}},
        {"vectors": [{"name": "modality-preference", "scale": 3}] * 2},
        {"vectors": [{"name": "modality-preference"}] * 9},
        {"vectors": [{}]},
        "on",
    ],
)
def test_errors_of_a_dry_run_are_those_of_a_chat(steering: Any, open_client: FlaskClient) -> None:
    chat, dry = ask(open_client, steering=steering), validate(open_client, steering=steering)
    assert (dry.status_code, dry.json) == (chat.status_code, chat.json)
    assert dry.status_code == 400


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"apply": {"tokens": "some"}}, "apply.tokens"),
        ({"apply": {"tokens": "image:2"}}, "apply.tokens"),
        ({"apply": {"token": "all"}}, "apply.token"),
        ({"layers": [99]}, "layers"),
        ({"layers": [1, 1]}, "layers"),
        ({"layers": []}, "layers"),
        ({"name": "nobody"}, "name"),
        ({"name": "stranger"}, "name"),
        ({"scale": 99}, "scale"),
    ],
)
def test_what_is_wrong_with_one_vector_of_several_names_it(
    wrong: dict[str, Any], param: str, open_client: FlaskClient
) -> None:
    vectors = [{"name": "modality-preference"}, {"name": "modality-preference", **wrong}]
    response = ask(open_client, data_uri(), QUESTION, steering={"vectors": vectors})
    assert (response.status_code, response.json["error"]["param"]) == (400, f"steering.vectors[1].{param}")
    message = response.json["error"]["message"]
    assert "'steering." not in message.replace("'steering.vectors[1].", "")
    content = [{"type": "image_url", "image_url": {"url": data_uri()}}]
    dry = validate(open_client, steering={"vectors": vectors}, messages=[{"role": "user", "content": content}])
    assert dry.json == response.json


def test_a_dry_run_needs_the_steering_and_the_right_model(open_client: FlaskClient) -> None:
    assert problem(validate(open_client)) == (400, "missing_required_parameter", "steering")
    assert problem(validate(open_client, steering=True, model="gpt-4o")) == (404, "model_not_found", "model")
    for body in (b"[1]", b"{", b""):
        response = open_client.post("/v1/steering/validate", data=body, content_type="application/json")
        assert problem(response) == (400, "invalid_json", None)
    assert open_client.post("/v1/steering/validate", data=b"x", content_type="text/plain").status_code == 415


def test_an_image_that_a_chat_does_not_have_is_refused(open_client: FlaskClient) -> None:
    response = ask(open_client, data_uri(), QUESTION, steering={"apply": {"tokens": "image:2"}})
    assert problem(response) == (400, "invalid_value", "steering.apply.tokens")
    response = ask(open_client, data_uri(), QUESTION, steering={"apply": {"tokens": "image:1"}})
    assert response.json["choices"][0]["applied"]["steering"][0]["apply"] == {"tokens": "image:1"}
