"""The sample scenes of a model's folder: what is offered, and that nothing else is ever read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

from server.app import create_app
from server.images import samples
from server.settings import Settings
from tests.server.fakes import FakeEngine, checkpoint

Write = Callable[..., FlaskClient]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model's folder with two pictures, and a file outside of `samples/`."""
    (tmp_path / "model" / "samples").mkdir(parents=True)
    for name, colour in (("a.png", "red"), ("b.jpg", "blue")):
        Image.new("RGB", (28, 28), colour).save(tmp_path / "model" / "samples" / name)
    (tmp_path / "model" / "secret.png").write_bytes(b"secret")
    return tmp_path / "model"


@pytest.fixture
def write(folder: Path) -> Write:
    """Write samples.json and return a client of a server with that model."""

    def client(listing: Any) -> FlaskClient:
        text = listing if isinstance(listing, str) else json.dumps(listing)
        (folder / "samples" / "samples.json").write_text(text)
        engine = FakeEngine()
        engine.can(folder=folder)
        return create_app(Settings(vectors=()), engine=engine).test_client()  # type: ignore[arg-type]

    return client


def sample(*images: str, **fields: Any) -> dict[str, Any]:
    return {"title": "One", "images": list(images), "question": "What is it?", **fields}


def test_the_listing_and_its_pictures(write: Write, folder: Path) -> None:
    client = write([sample("a.png", "b.jpg", context="It is red."), sample("b.jpg", later="ignored")])
    listing = client.get("/samples")
    assert listing.json == {
        "object": "list",
        "data": [
            {"title": "One", "images": ["a.png", "b.jpg"], "question": "What is it?", "context": "It is red."},
            {"title": "One", "images": ["b.jpg"], "question": "What is it?", "context": None},
        ],
    }
    for name, kind in (("a.png", "image/png"), ("b.jpg", "image/jpeg")):
        picture = client.get(f"/samples/{name}")
        assert (picture.data, picture.content_type) == ((folder / "samples" / name).read_bytes(), kind)
        assert picture.headers["X-Content-Type-Options"] == "nosniff"
        assert client.get(f"/samples/{name}", headers={"If-None-Match": picture.headers["ETag"]}).status_code == 304


def test_only_listed_names_are_served(write: Write) -> None:
    client = write([sample("a.png")])
    for name in (
        "b.jpg",
        "samples.json",
        "../secret.png",
        "..%2fsecret.png",
        "%2e%2e/secret.png",
        "a.png%00",
        "A.PNG",
    ):
        assert client.get(f"/samples/{name}").status_code == 404, name


@pytest.mark.parametrize(
    "name",
    ["../secret.png", "/etc/passwd", "a.svg", "samples.json", ".png", "a.png\n", "missing.png", "..", "x/../a.png", ""],
)
def test_a_listing_cannot_name_other_files(write: Write, folder: Path, name: str) -> None:
    client = write([sample(name), sample("a.png", name), sample("a.png")])
    assert client.get("/samples").json["data"] == [{**sample("a.png"), "context": None}]  # type: ignore[index]
    assert client.get("/samples/secret.png").status_code == 404


def test_pictures_that_are_too_large_or_empty_are_not_offered(
    write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "samples" / "empty.png").write_bytes(b"")
    client = write([sample("a.png"), sample("empty.png")])
    assert len(client.get("/samples").json["data"]) == 1  # type: ignore[index]
    monkeypatch.setattr(samples, "MAX_PICTURE", (folder / "samples" / "a.png").stat().st_size - 1)
    assert client.get("/samples").json["data"] == []  # type: ignore[index]
    assert client.get("/samples/a.png").status_code == 404


@pytest.mark.parametrize(
    "listing",
    ["not json", "{}", "[1]", [{"title": "no pictures"}], [sample("a.png", title="x" * 81)], [sample("a.png", question=3)],
     [sample("a.png")] * 65, [sample(*["a.png"] * 17)], "[" + " " * samples.MAX_LISTING + "]"],
)  # fmt: skip
def test_a_wrong_listing_offers_nothing_and_is_logged(
    write: Write, listing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    response = write(listing).get("/samples")
    assert (response.status_code, response.json) == (200, {"object": "list", "data": []})
    assert "samples.json is not used" in caplog.text


def test_no_samples_at_all(folder: Path) -> None:
    for path in (None, folder, folder / "nowhere"):
        engine = FakeEngine()
        engine.can(folder=path)
        client = create_app(Settings(vectors=()), engine=engine).test_client()  # type: ignore[arg-type]
        assert client.get("/samples").json == {"object": "list", "data": []}
        assert client.get("/samples/a.png").status_code == 404


def test_the_embedded_model_has_samples(client: FlaskClient) -> None:
    listed = json.loads((checkpoint() / "samples" / "samples.json").read_text())
    offered = client.get("/samples").json["data"]  # type: ignore[index]
    assert [item["title"] for item in offered] == [item["title"] for item in listed]
    assert 6 <= len(offered) <= 8
    assert {len(item["images"]) for item in offered} == {1, 2, 3}
