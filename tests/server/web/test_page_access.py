"""The playground is used by keyboard, on a phone, by a screen reader, without motion, in light and dark."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.web.browser import Visit
from tests.server.web.playing import GREEN, heat, pick, send


def test_everything_is_done_by_keyboard(playground: Callable[..., Visit]) -> None:
    page = playground().page

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"Tab never reaches {selector}")

    tab_to(".sample")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tray li")
    tab_to("#helm")
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert page.locator("#helm-value").text_content() == "1.0 toward the image"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#answer-words:not([hidden])")
    tab_to("#answer-words .word")
    attention = heat(page, 1)
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == "yellow."
    assert "“yellow.”" in page.locator("#look-note").inner_text()
    assert heat(page, 1) != attention
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.keyboard.press("Escape")
    tab_to("#layer")
    page.keyboard.press("ArrowRight")
    assert page.locator("#layer-value").text_content() == "0"
    tab_to("#card-focus svg")
    page.keyboard.press("ArrowRight")
    assert page.locator("#card-focus .place").text_content() == "layer 1"


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_needs_no_sideways_scrolling(playground: Callable[..., Visit], width: int) -> None:
    opened = playground(viewport={"width": width, "height": 780}, color_scheme="dark")
    assert opened.fits()
    pick(opened.page, "Which of three")
    opened.page.get_by_text("Sampling and readouts").click()
    opened.page.locator("#asked-contrast").select_option("icd")
    send(opened.page)
    assert opened.fits()
    opened.page.get_by_text("Raw JSON").click()
    assert opened.fits()


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a, [role=toolbar], svg[role=img]")]
    .filter((e) => e.offsetParent !== null)
    .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute("aria-labelledby")))
    .map((e) => e.outerHTML)"""


def test_everything_has_a_name(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    page.locator("#asked-contrast").select_option("vcd")
    send(page)
    assert page.evaluate(NAMELESS) == []


def test_motion_is_left_out_where_the_person_says_so(playground: Callable[..., Visit]) -> None:
    page = playground().page
    duration = "getComputedStyle(document.getElementById('asked-sage-see')).transitionDuration"
    assert page.evaluate(duration) == "0.15s"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(duration) == "0s"


def test_light_and_dark(playground: Callable[..., Visit]) -> None:
    page = playground(color_scheme="dark").page
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Dark theme").click()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light
