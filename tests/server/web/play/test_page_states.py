"""Messages of the playground about a server that is loading, full, gone, or cannot read a picture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.engine.local import adapted
from server.engine.runtime import Runtime, Serving
from server.settings import Settings
from steering import Busy
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit, until
from tests.server.web.playing import GREEN, SAMPLES, pick, send

DOT = "getComputedStyle(document.getElementById('model'), '::before').backgroundColor"
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"


def colour(page: Any, name: str) -> str:
    """Return a colour of the style sheet, as the browser computes it."""
    return str(
        page.evaluate(
            """(name) => {
                const probe = document.createElement("i");
                document.body.append(probe);
                probe.style.color = `var(${name})`;
                const found = getComputedStyle(probe).color;
                probe.remove();
                return found;
            }""",
            name,
        )
    )


@pytest.mark.parametrize("path", ["/", "/vectors", "/model"])
def test_loading_is_told_with_how_far_it_is(
    visit: Callable[..., Visit], live: Callable[[Flask], str], engine: steering.Engine, path: str
) -> None:
    settings = Settings(vectors=(), journal="off")  # type: ignore[arg-type]
    loaded = threading.Event()

    def load(settings: Settings) -> Serving:
        loaded.wait(30)
        return Serving.of(adapted(engine), settings)

    runtime = Runtime(settings, loader=load)
    runtime.start()
    runtime.progress.tell("Loading weights", 0.42)
    opened = visit()
    opened.expected = ("503",)
    page = opened.page
    page.goto(live(create_app(settings, runtime=runtime)) + path)
    page.get_by_text("Loading weights, 42 %").wait_for()
    page.get_by_text("Loading the model").wait_for()
    assert page.locator("progress").get_attribute("value") == "0.42"
    assert page.evaluate(DOT) == colour(page, "--danger")
    assert page.locator("#send:enabled").count() == 0
    loaded.set()
    page.get_by_text("helmsight-demo", exact=True).first.wait_for()
    assert page.evaluate(DOT) == colour(page, "--accent")
    if path == "/":
        pick(page, GREEN)
        assert page.locator("#send").is_enabled()


def test_a_server_that_is_gone_is_told_and_found_again(playground: Callable[..., Visit]) -> None:
    opened = playground()
    opened.expected = ("ERR_INTERNET_DISCONNECTED",)
    page = opened.page
    pick(page, GREEN)
    page.context.set_offline(True)
    page.evaluate(LOOK)
    page.get_by_text("The server is gone.").wait_for()
    assert page.evaluate(DOT) == colour(page, "--danger")
    page.locator("#send").click()
    page.locator("#error").get_by_text("The server cannot be reached.").wait_for()
    page.context.set_offline(False)
    page.locator("#model b").wait_for()
    assert page.evaluate(DOT) == colour(page, "--accent")
    assert page.locator("#question").input_value() == "What color is the star?"  # what was typed is still there
    assert send(page)
    assert page.locator("#error").is_hidden()


def test_a_full_server_is_asked_again_when_it_says(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine()
    fake.refusal = Busy(3, retry_after=2.0)
    opened = visit()
    opened.expected = ("429",)
    page = opened.page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    for left in (2, 1):
        page.get_by_text(f"The server is full. Retrying in {left} s…").wait_for()
    fake.refusal = None
    until(page, "document.getElementById('answer-live').textContent === 'Hello world'")
    assert "full" not in page.locator("#answer-meta").inner_text()
    assert page.locator("#error").is_hidden()


def test_waiting_for_a_full_server_can_be_stopped(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine()
    fake.refusal = Busy(3, retry_after=30.0)
    opened = visit()
    opened.expected = ("429",)
    page = opened.page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    page.get_by_text("Retrying in").wait_for()
    page.get_by_role("button", name="Stop").click()
    until(page, "!document.getElementById('send').disabled")
    assert fake.requests == []


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'


def test_a_picture_that_cannot_be_read_is_named_and_goes_away(playground: Callable[..., Visit]) -> None:
    opened = playground()
    opened.expected = ("400",)
    page = opened.page
    pick(page, GREEN)
    page.locator("#files").set_input_files([{"name": "a.svg", "mimeType": "image/svg+xml", "buffer": SVG}])
    page.get_by_text("a.svg cannot be read as an image").wait_for()  # browsers show these, servers do not take them
    assert page.locator("#tray li").count() == 1

    def refused(route: Any) -> None:
        if len(route.request.post_data_json["messages"][1]["content"]) < 4:
            return route.continue_()
        param = "messages[1].content[1].image_url"
        error = {"message": f"'{param}' may hold at most 9 pixels.", "param": param, "code": "image_too_large"}
        return route.fulfill(status=400, json={"error": error})

    page.route("**/v1/chat/completions", refused)
    page.locator("#system-row summary").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#files").set_input_files(
        [{"name": "big.svg.png", "mimeType": "image/png", "buffer": (SAMPLES / "pink.png").read_bytes()}]
    )
    page.wait_for_selector("#tray li:nth-child(2)")
    assert page.locator("#error").is_hidden()  # what was told of the one before
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Image 2 (big.svg.png) cannot be used and was removed: it may hold at most 9 pixels.").wait_for()
    assert page.locator("#tray li").count() == 1
    assert send(page)
    assert page.locator("#error").is_hidden()
