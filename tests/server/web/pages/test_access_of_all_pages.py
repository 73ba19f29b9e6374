"""All pages by axe-core in every look, with something to show.

`tests/first_hour` tests how a newcomer meets playground and dashboard.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.conftest import ask, data_uri
from tests.server.web.browser import Visit
from tests.server.web.pages.axe import everywhere
from tests.server.web.playing import GREEN, SAMPLES, pick, steer


@pytest.fixture(scope="module")
def demo(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Flask:
    """Return an application of the embedded model with a journal that holds something, and uploads allowed."""
    folder: Path = tmp_path_factory.mktemp("pages")
    settings = Settings(
        vectors=(str(folder / "vectors"),),
        slots=8,
        max_waiting=8,
        journal=str(folder / "journal.db"),
        allow_uploads=True,
    )  # type: ignore[arg-type]
    app = create_app(settings, engine=engine)  # type: ignore[arg-type]
    client = app.test_client()
    for fields in ({}, {"steering": {"toward": "text"}, "diagnostics": True}, {"sage": True}):
        assert ask(client, "What is it?", data_uri(), **fields).status_code == 200
    return app


@pytest.fixture
def at(demo: Flask, live: Callable[[Flask], str], visit: Callable[..., Visit]) -> Callable[[str, str], Any]:
    """Open a page; returns it when something stands on it."""

    def begin(path: str, ready: str) -> Any:
        page = visit(viewport={"width": 1280, "height": 800}, reduced_motion="reduce").page
        page.goto(live(demo) + path)
        page.wait_for_selector(ready)
        return page

    return begin


def test_the_playground_with_everything_on_it(at: Callable[[str, str], Any]) -> None:
    page = at("/", ".sample")
    for details in page.locator("#form details").all():
        details.evaluate("details => details.open = true")
    pick(page, GREEN)
    page.locator("#asked-sage-see").check()
    page.locator("#asked-contrast").select_option("vcd")
    steer(page, 1)
    page.locator("#send").click()
    page.wait_for_selector("#card-flags")
    page.locator("#token").fill("2")
    page.get_by_role("button", name="Follow up").first.click()
    page.locator("#files").set_input_files([SAMPLES / "pink.png"])
    page.wait_for_selector("#tray li")
    page.locator("#send").click()  # without a question, which is told
    page.locator("#error").wait_for()
    assert everywhere(page) == []


def test_the_list_of_what_was_asked(at: Callable[[str, str], Any]) -> None:
    page = at("/", ".sample")
    pick(page, GREEN)
    page.locator("#send").click()
    page.wait_for_selector("#card-flags")
    page.get_by_role("button", name="History").click()
    page.wait_for_selector("#history-list button")
    assert everywhere(page) == []


def test_answers_side_by_side(at: Callable[[str, str], Any]) -> None:
    page = at("/", ".sample")
    pick(page, GREEN)
    page.locator("#compare").click()
    page.wait_for_selector("#card-flags")
    assert everywhere(page) == []


@pytest.mark.parametrize(
    ("path", "ready"),
    [("/vectors", "#vectors .chart svg"), ("/model", "#about dl")],
)
def test_the_other_pages(at: Callable[[str, str], Any], path: str, ready: str) -> None:
    page = at(path, ready)
    assert page.locator("h1").count() == 1
    assert everywhere(page) == []
