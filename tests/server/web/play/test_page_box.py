"""A box on a picture draws the model's attention there: drawn with the mouse, or given by keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from tests.server.web.browser import Visit
from tests.server.web.pages.axe import everywhere
from tests.server.web.playing import GREEN, TWO, asked, bodies_of, pick, send

QUESTION = "What do you see?"
LOWER_LEFT = [0.0, 0.5, 0.5, 1.0]


def drag(page: Any, image: int, box: list[float]) -> None:
    """Draw a box, in shares of the picture, with the mouse."""
    stack, (x0, y0, x1, y1), mouse = page.locator("#views .stack").nth(image - 1), box, page.mouse
    stack.scroll_into_view_if_needed()
    area = stack.bounding_box()

    def at(x: float, y: float) -> tuple[float, float]:
        return area["x"] + x * area["width"], area["y"] + y * area["height"]

    left, top = at(x0, y0)
    mouse.move(left + 1, top + 1)  # within the picture, also from its corner
    mouse.down()
    mouse.move(*at((x0 + x1) / 2, (y0 + y1) / 2))
    mouse.move(*at(x1, y1))
    mouse.up()


def shown_box(page: Any, image: int) -> list[float] | None:
    """Return the outline over a picture in shares of it, None where there is none."""
    box = page.locator("#views .stack").nth(image - 1).locator(".box")
    if box.is_hidden():
        return None
    frame, area = box.bounding_box(), page.locator("#views .stack").nth(image - 1).bounding_box()
    left, top = (frame["x"] - area["x"]) / area["width"], (frame["y"] - area["y"]) / area["height"]
    return [left, top, left + frame["width"] / area["width"], top + frame["height"] / area["height"]]


def answered(page: Any) -> str:
    page.wait_for_selector("#answers:not([aria-busy])")
    return str(page.locator("#answer-live").text_content())


def share_in(choice: Any, image: int, box: list[float]) -> float:
    """Return the share of attention to the patches that lies in a box of an image, mean over layers."""
    diagnostics = choice["diagnostics"]
    grid = diagnostics["images"][image - 1]["grid"]
    (maps,) = (entry["rho"] for entry in diagnostics["patches"] if entry["image"] == image)
    rows, columns = grid[:2]
    x0, y0, x1, y1 = box
    inside = [
        row * columns + column
        for row in range(rows)
        for column in range(columns)
        if x0 * columns <= column < x1 * columns and y0 * rows <= row < y1 * rows
    ]
    total = sum(sum(sum(layer) for layer in entry["rho"]) for entry in diagnostics["patches"])
    return float(sum(layer[cell] for layer in maps for cell in inside) / total)


def test_a_box_that_is_drawn_moves_the_map_and_the_answer(playground: Callable[..., Visit], demo: Flask) -> None:
    visit = playground()
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, TWO)
    page.locator("#question").fill(QUESTION)
    plain = send(page)
    before = share_in(asked(demo, page), 1, LOWER_LEFT)
    note = page.locator("#views figure").nth(0).locator(".soft").first.inner_text()
    assert shown_box(page, 1) is None
    assert page.locator("#box-clear").is_hidden()
    drag(page, 1, LOWER_LEFT)
    new = answered(page)
    sent = bodies[-1]["look_at"]
    assert sent == {"box": pytest.approx(LOWER_LEFT, abs=0.011), "bias": 3}, "the first image is the default"
    assert new != plain
    now = asked(demo, page)  # the page's own request, given once more
    assert now["message"]["content"] == new
    assert now["applied"]["look_at"]
    assert share_in(now, 1, LOWER_LEFT) > 1.5 * before
    assert page.locator("#views figure").nth(0).locator(".soft").first.inner_text() != note, (
        "the page's map is the new one"
    )
    assert shown_box(page, 1) == pytest.approx(sent["box"], abs=0.02)
    assert shown_box(page, 2) is None
    page.locator("#box-clear").click()
    assert answered(page) == plain
    assert "look_at" not in bodies[-1] or not bodies[-1]["look_at"]
    assert shown_box(page, 1) is None
    visit.check()


def test_a_click_draws_no_box(playground: Callable[..., Visit]) -> None:
    visit = playground()
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, GREEN)
    send(page)
    count = len(bodies)
    page.locator("#views .stack").first.click()
    page.wait_for_timeout(300)
    assert len(bodies) == count
    assert shown_box(page, 1) is None
    visit.check()


def test_a_box_is_given_by_keys_alone(playground: Callable[..., Visit]) -> None:
    visit = playground(reduced_motion="reduce")
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, TWO)
    page.locator("#question").fill(QUESTION)
    plain = send(page)
    page.get_by_role("button", name="Box in image 1").focus()
    page.keyboard.press("Enter")
    assert shown_box(page, 1) == pytest.approx([0.25, 0.25, 0.75, 0.75], abs=0.02)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "left edge in per cent of image 1"
    assert everywhere(page) == []
    page.keyboard.press("Escape")
    assert shown_box(page, 1) is None
    assert page.evaluate("document.activeElement.textContent") == "Box"
    page.keyboard.press("Enter")
    for edge in (0, 50, 50, 100):
        page.keyboard.press("Control+a")
        page.keyboard.type(str(edge))
        page.keyboard.press("Tab")
    assert shown_box(page, 1) == pytest.approx(LOWER_LEFT, abs=0.02), "what the keys say is shown before it is sent"
    assert page.evaluate("document.activeElement.textContent") == "Look there"
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#box-clear').hidden === false")
    assert answered(page) != plain
    assert bodies[-1]["look_at"] == {"box": LOWER_LEFT, "bias": 3}
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Box in image 1", "focus is not lost"
    page.keyboard.press("Enter")
    page.keyboard.press("Control+a")
    page.keyboard.type("50")  # as far right as the right edge
    page.keyboard.press("Enter")
    form = page.get_by_role("form", name="Box in image 1")
    assert "right edge must be behind" in form.inner_text()
    assert shown_box(page, 1) is None
    page.keyboard.press("Escape")
    assert shown_box(page, 1) == pytest.approx(LOWER_LEFT, abs=0.02), "the box of the answer stays"
    visit.check()


def test_a_link_holds_the_box(playground: Callable[..., Visit]) -> None:
    visit = playground()
    page = visit.page
    pick(page, GREEN)
    send(page)
    drag(page, 1, [0.2, 0.2, 0.6, 0.6])
    answered(page)
    page.wait_for_function("() => location.hash.includes('look_at')")
    address = page.url
    page.goto("about:blank")
    bodies = bodies_of(page)
    page.goto(address)
    page.wait_for_selector("#tray li")
    send(page)
    assert bodies[-1]["look_at"]["box"] == pytest.approx([0.2, 0.2, 0.6, 0.6], abs=0.011)
    assert shown_box(page, 1) == pytest.approx([0.2, 0.2, 0.6, 0.6], abs=0.02)
    visit.check()


def test_a_box_in_the_second_image_names_it(playground: Callable[..., Visit]) -> None:
    visit = playground()
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, TWO)
    send(page)
    drag(page, 2, [0.5, 0.1, 0.9, 0.6])
    answered(page)
    assert bodies[-1]["look_at"]["image"] == 2
    assert shown_box(page, 1) is None
    assert shown_box(page, 2) == pytest.approx([0.5, 0.1, 0.9, 0.6], abs=0.03)
    visit.check()


def test_no_box_is_offered_where_attention_cannot_be_drawn(playground: Callable[..., Visit]) -> None:
    page = playground().page

    def models(route: Any) -> None:
        found = route.fetch().json()
        item = found["data"][0]
        item["interventions"] = [entry for entry in item["interventions"] if entry["name"] != "look_at"]
        route.fulfill(json=found)

    page.route("**/v1/models", models)
    page.reload()
    page.wait_for_selector(".sample")
    pick(page, GREEN)
    send(page)
    assert page.locator("#views figure").count() == 1
    assert page.get_by_role("button", name="Box in image 1").count() == 0
    assert page.locator("#box-row").is_hidden()
    assert page.locator(".drawable").count() == 0
