"""A request that brings nothing leaves what was there: the answers, their history, and what goes on from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit, until
from tests.server.web.playing import GREEN, pick, send, steer


def refuse(page: Any) -> None:
    """Send what the server refuses, and wait until the page says so."""
    page.locator("#max-tokens").evaluate("input => { input.value = '0'; input.dispatchEvent(new Event('change')); }")
    page.get_by_role("button", name="Send").click()
    page.locator("#error").get_by_text("'max_tokens'").wait_for()


def test_a_refused_request_leaves_the_answers_before(playground: Callable[..., Visit]) -> None:
    opened = playground()
    opened.expected = ("400",)
    page = opened.page
    pick(page, GREEN)
    steer(page, 1)
    answer = send(page)
    chips = page.locator("#answer-chips").inner_text()
    assert chips == "toward the image, 1"
    page.locator("#question").fill("What else?")
    refuse(page)
    assert page.locator("#answer-words").inner_text() == answer
    assert page.locator("#answer-chips").inner_text() == chips
    assert page.locator("#base").is_visible()
    assert page.locator("#card-focus").is_visible()
    assert page.locator("#views figure").count() == 1
    until(page, "(JSON.parse(sessionStorage.getItem('helmsight.draft'))?.shown ?? null) !== null")
    page.reload()
    page.wait_for_selector("#card-focus")
    assert page.locator("#answer-words").inner_text() == answer
    assert page.locator("#question").input_value() == "What else?"
    page.get_by_role("button", name="History").click()
    page.locator("#history-list button").wait_for()
    assert page.locator("#history-list button").count() == 1
    page.keyboard.press("Escape")
    refuse(page)
    page.get_by_role("button", name="Follow up").first.click()
    turn = page.locator("#turns li").inner_text()
    assert "What color is the star?" in turn
    assert answer in turn


def test_what_is_begun_anew_stays_empty(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=FakeEngine("Hello"))))  # type: ignore[arg-type]
    page.locator("#send:enabled").wait_for()
    page.locator("#question").fill("hi")
    send(page)

    page.route("**/v1/chat/completions", lambda route: None)  # no answer comes
    page.get_by_role("button", name="Send").click()
    page.locator("#stop").wait_for()
    page.get_by_role("button", name="New").click()
    page.locator("#stop").wait_for(state="hidden")
    assert page.locator("#answers").is_hidden()
    assert page.locator("#empty").is_visible()
