"""The page of the API's document: it says all of it, without scripts of its own and without any network."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from server.openapi.reference import reference, rich, type_of
from tests.server.web.browser import Visit


def plain(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", markup))


def test_every_route_field_and_example_of_the_document_is_on_the_page(client: FlaskClient) -> None:
    document: dict[str, Any] = client.get("/openapi.json").json
    page = client.get("/docs").text
    text = " ".join(plain(page).split())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            assert plain(rich(operation["summary"])) in text
            for media in operation.get("requestBody", {}).get("content", {}).values():
                for example in media.get("examples", {}).values():
                    shown = json.dumps(example["value"], indent=2)
                    assert shown in html.unescape(page)
    anchors = set(re.findall(r'id="([^"]+)"', page))
    for name, schema in document["components"]["schemas"].items():
        assert f"schema-{name}" in anchors
        for field in schema["properties"]:
            assert f"<code>{field}</code>" in page
    assert set(re.findall(r'href="#([^"]+)"', page)) <= anchors


def test_the_page_holds_no_script_and_no_style_of_its_own(client: FlaskClient) -> None:
    response = client.get("/docs")
    tags = " ".join(re.findall(r"<[^>]+>", response.text))
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", tags)
    assert re.findall(r"<script[^>]*>", tags) == ['<script src="/static/theme.js">']
    assert all(
        target.startswith(("/", "#")) and not target.startswith("//")
        for target in re.findall(r'(?:src|href)="([^"]*)"', tags)
    )
    assert "script-src 'self'" in response.headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#/components/schemas/See"}, '<a href="#schema-See">See</a>'),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "integer or null"),
        ({"type": "array", "items": {"type": ["string", "null"]}}, "list of string or null"),
        ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}]}, "[integer, integer]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "object of number"),
        ({"enum": ["a", None]}, "<code>&#34;a&#34;</code>, <code>null</code>"),
        ({"const": "<b>"}, "<code>&#34;&lt;b&gt;&#34;</code>"),
        ({}, "anything"),
    ],
)
def test_types_are_said_in_words(schema: dict[str, Any], said: str) -> None:
    assert type_of(schema) == said


def test_what_is_said_is_text() -> None:
    assert rich("a <b> & `<c>`\n d") == "a &lt;b&gt; &amp; <code>&lt;c&gt;</code> d"
    limited = {
        "type": "object",
        "properties": {"x": {"anyOf": [{"type": "number", "minimum": 0}], "maximum": 2, "default": 1}},
    }
    shown = reference({
        "info": {"title": "T", "version": "1", "description": ""}, "tags": [], "paths": {},
        "components": {"responses": {}, "schemas": {"X": limited}},
    })  # fmt: skip
    assert shown["schemas"][0].rows[0].type == "number <small>at least 0, at most 2, default 1</small>"


@pytest.mark.parametrize("size", [(360, 740), (768, 1024), (1280, 900)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_read_in_a_browser(
    app: Flask, live: Callable[[Flask], str], visit: Callable[..., Visit], size: tuple[int, int], scheme: str
) -> None:
    opened = visit(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = opened.page
    page.goto(f"{live(app)}/docs")
    assert page.locator("h1").count() == 1
    assert page.get_by_text("Connecting").count() == 0
    page.locator('.contents a[href="#create_completion"]').click()
    page.locator("#create_completion").get_by_text("A question about an image").click()
    assert "image_url" in page.locator("details[open] pre").inner_text()
    page.locator("#create_completion").get_by_role("link", name="ChatRequest").click()
    assert page.locator("#schema-ChatRequest h3").is_visible()
    assert opened.fits()
