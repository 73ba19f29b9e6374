"""The pages' files without a browser: headers, policy, caching, and that nothing outside their folder is served."""

from __future__ import annotations

import gzip
import re

import pytest
from flask.testing import FlaskClient

from server.app import create_app
from server.settings import Settings
from server.web.page import STATIC
from tests.server.fakes import FakeEngine


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/vectors",
        "/model",
        "/dashboard",
        "/docs",
        "/static/style.css",
        "/static/vendor/jsdiff.js",
        "/static/icon.svg",
    ],
)
def test_the_headers_of_the_pages(client: FlaskClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data: blob:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert response.headers["X-Frame-Options"] == "DENY"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    again = client.get(path, headers={"If-None-Match": response.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")
    assert client.get(path, headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/vectors", "/model", "/dashboard"])
def test_the_pages_hold_nothing_inline_and_nothing_from_elsewhere(client: FlaskClient, path: str) -> None:
    page = client.get(path).text
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:|//", page.replace("<!doctype html>", ""))
    for tag in re.findall(r"<script[^>]*>[^<]*</script>", page):
        assert re.fullmatch(r'<script (type="module" )?src="/static/[a-z]+\.js"></script>', tag)
    for source in re.findall(r'(?:src|href)="(/static/[^"]+)"', page):
        assert client.get(source).status_code == 200, source


def test_each_file_has_its_type(client: FlaskClient) -> None:
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for file in (file for file in STATIC.rglob("*") if file.suffix in kinds):
        assert client.get(f"/static/{file.relative_to(STATIC)}").content_type == kinds[file.suffix]


def test_what_others_wrote_has_its_licence_beside_it() -> None:
    for file in (STATIC / "vendor").glob("*.js"):
        assert file.with_suffix(".LICENSE.txt").is_file(), file.name


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "..%2fpage.py",
        "../page.py",
        "%2e%2e/page.py",
        "style.css%00",
        ".",
        "",
        "/etc/passwd",
        "STYLE.CSS",
        "vendor",
        "vendor/nothing.js",
        "vendor/..%2fstyle.css",
        "vendor/../style.css",
        "vendor/jsdiff.LICENSE.txt",
    ],
)
def test_only_files_of_the_folder_are_served(client: FlaskClient, name: str) -> None:
    response = client.get(f"/static/{name}")
    assert response.status_code == 404
    assert response.json is not None
    assert response.json["error"]["type"] == "not_found_error"


def test_the_pages_need_no_key_but_the_samples_do() -> None:
    settings = Settings(api_keys=("sk-0123456789",), journal="off")  # type: ignore[arg-type]
    client = create_app(settings, engine=FakeEngine()).test_client()  # type: ignore[arg-type]
    for path in ("/", "/vectors", "/model", "/dashboard", "/docs", "/openapi.json", "/static/style.css"):
        assert client.get(path).status_code == 200
    for path in ("/samples", "/samples/cyan.png", "/about", "/static", "/static/../v1/models"):
        assert client.get(path).status_code in (401, 404)
    assert client.get("/samples").status_code == client.get("/v1/models").status_code == 401


def test_texts_travel_packed_where_that_is_understood(client: FlaskClient) -> None:
    plain = client.get("/static/style.css")
    packed = client.get("/static/style.css", headers={"Accept-Encoding": "gzip"})
    assert (packed.headers["Content-Encoding"], packed.headers["Vary"]) == ("gzip", "Accept-Encoding")
    assert "Content-Encoding" not in plain.headers
    assert gzip.decompress(packed.data) == plain.data
    assert len(packed.data) < len(plain.data) / 2
    assert packed.headers["ETag"] != plain.headers["ETag"]
    headers = {"Accept-Encoding": "gzip", "If-None-Match": packed.headers["ETag"]}
    assert client.get("/static/style.css", headers=headers).status_code == 304


def test_what_is_told_of_the_model(client: FlaskClient) -> None:
    said = client.get("/about").json
    assert said is not None
    assert (said["architecture"], said["family"]) == ("Qwen2VLForConditionalGeneration", "qwen2_vl")
    assert {"qwen2_vl", "internvl"} <= set(said["families"])
    assert said["calibration"]["sinks"] == {"images": 200}
    assert set(said["calibration"]["flags"]["raised"]) == {"perceptual_blindness", "dissociation"}
