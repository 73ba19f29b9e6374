"""The playground of a server that is slow, broken, or asks for a key."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from flask import Flask

import steering
from server.app import create_app
from server.settings import PresetTable, Settings
from tests.server.access.conftest import KeyFile
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit, until
from tests.server.web.playing import GREEN, pick, send
from tests.waiting import PATIENCE


def test_stop_ends_the_answer(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("Hel", threading.Event())
    opened = visit()
    page = opened.page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.get_by_text("No steering vector of this server matches the model.").wait_for()
    assert page.locator("#helm").is_disabled()
    assert page.locator("#samples-section").is_hidden()
    page.locator("#question").fill("hi")
    page.get_by_role("button", name="Send").click()
    until(page, "document.getElementById('answer-live').textContent === 'Hel'")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert fake.completions[0].cancelled.wait(PATIENCE)
    assert page.get_by_role("button", name="Send").is_enabled()


def test_a_stream_that_breaks_is_told(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("Hel", ValueError("boom"))
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    page.get_by_text("The server had an unexpected error").wait_for()
    assert page.locator("#answer-live").text_content() == "Hel"


def test_the_key_is_asked_for_and_kept_in_the_tab(
    visit: Callable[..., Visit], live: Callable[[Flask], str], engine: steering.Engine
) -> None:
    settings = Settings(vectors=(), api_keys=("sk-0123456789",), journal="off")  # type: ignore[arg-type]
    opened = visit()
    opened.expected = ("401",)
    page = opened.page
    page.goto(live(create_app(settings, engine=engine)))
    page.get_by_label("This server requires an API key.").fill("sk-wrong-key")
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("Incorrect API key provided.").wait_for()
    page.get_by_label("This server requires an API key.").fill("sk-0123456789")
    page.get_by_role("button", name="Use key").click()
    pick(page, GREEN)
    assert page.locator("#key-form").is_hidden()
    assert send(page) == "The star is green."
    assert "$HELMSIGHT_API_KEY" in page.locator("#code-text").text_content()
    assert page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href").count("0123") == 0
    assert page.evaluate("JSON.stringify({...sessionStorage})").count("sk-0123456789") == 1


def test_a_key_that_may_not_or_not_so_often_is_told(
    visit: Callable[..., Visit], live: Callable[[Flask], str], tmp_path: Path
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    given = {
        name: keys.add(name, role, rate=rate)["Authorization"].removeprefix("Bearer ")
        for name, role, rate in (("reader", "journal", None), ("app", "use", "1/minute"))
    }
    settings = Settings(vectors=(), named_key_file=str(keys.path), journal="off")  # type: ignore[arg-type]
    opened = visit()
    opened.expected = ("401", "403", "429")
    page = opened.page
    page.goto(live(create_app(settings, engine=FakeEngine())))  # type: ignore[arg-type]
    field, use = page.get_by_label("This server requires an API key."), page.get_by_role("button", name="Use key")
    field.fill(given["reader"])
    use.click()
    page.locator("#key-error", has_text="The key 'reader' lacks the role 'use'").wait_for()
    field.fill(given["app"])
    use.click()
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    until(page, "document.getElementById('answer-live')?.textContent === 'Hello world'")
    page.locator("#send:enabled").click()
    page.get_by_text("The key 'app' may send at most 1 chat in a minute; the next one in").wait_for()


def test_what_a_model_says_is_text(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("<img src=x onerror=alert(1)>", "<b>bold</b>")
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    page.wait_for_selector("#answers:not([aria-busy])")
    assert page.locator("#answer-live").text_content() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.locator("#answer-live").evaluate("element => element.children.length") == 0


def test_the_page_of_the_model_lists_the_presets(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    settings = Settings(journal="off", vectors=(), presets={"calm": PresetTable(fields={"temperature": 0})})  # type: ignore[arg-type]
    page = visit().page
    page.goto(live(create_app(settings, engine=FakeEngine())) + "/model")  # type: ignore[arg-type]
    rows = page.get_by_role("region", name="Presets and their fields").locator("tbody tr")
    rows.first.wait_for()
    shown = [row.split("\t") for row in rows.all_inner_texts()]
    assert ["@sage", '{ "sage": true }', "built-in"] in shown
    assert shown[-1] == ["@calm", '{ "temperature": 0 }', "settings"]
