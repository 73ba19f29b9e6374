"""Uploads that are off, damaged, foreign, too large or too many are refused by name; vectors that were not uploaded stay."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient
from pydantic import SecretStr
from safetensors.torch import load, save

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.vectors.uploads import BINARY, ROUTE, MakeVector, metadata_of, problem, upload
from tests.waiting import computing_within


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
    entry = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    header = ("{" + ", ".join(f'"{number:x}": {entry}' for number in range(300_000)) + "}").encode()
    with computing_within(1):  # measured are 0.05, and 4.4 where it is parsed
        response = upload(open_client, len(header).to_bytes(8, "little") + header)
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
