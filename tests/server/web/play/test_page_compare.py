"""Several answers from one click: what is asked, that they stream side by side, and what differs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from flask import Flask

from server.app import create_app
from server.settings import Settings
from steering.protocol.intervention import REGISTRY
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit, until
from tests.server.web.playing import DIAMOND, GREEN, pick, send, steer

WITHOUT_VECTOR = [kind for name, (kind, _) in REGISTRY.items() if name not in ("steering", "project_out")]
"""The interventions that a server without vectors is asked for."""


def compare(page: Any) -> list[Any]:
    """Click on Compare; returns the bodies of the requests that come of it, when all are answered."""
    bodies: list[Any] = []

    def noted(request: Any) -> None:
        if request.url.endswith("/chat/completions"):
            bodies.append(request.post_data_json)

    page.on("request", noted)
    page.locator("#compare").click()
    page.wait_for_selector("#answers:not([hidden]):not([aria-busy])")
    page.wait_for_selector("#save-json")
    page.remove_listener("request", noted)
    return bodies


def answers(page: Any) -> dict[str, str]:
    """Return the texts of the cards by their titles."""
    cards = page.locator("#answers article")
    return {
        card.locator("h2").inner_text(): card.locator(".text:visible").inner_text()
        for card in (cards.nth(i) for i in range(cards.count()))
    }


def test_one_click_asks_with_several_strengths(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, DIAMOND)
    asked = compare(page)
    strengths = [body.get("steering", {"toward": None, "strength": 0}) for body in asked]
    assert sorted((s["strength"], s["toward"] or "") for s in strengths) == [
        (0, ""), (0.3, "text"), (0.3, "vision"), (1, "text"), (1, "vision"),
    ]  # fmt: skip
    assert not any(body.get("baseline") for body in asked)
    found = answers(page)
    assert list(found) == [
        "1 toward the text", "0.3 toward the text", "Not steered", "0.3 toward the image", "1 toward the image",
    ]  # fmt: skip
    plain = found["Not steered"]
    assert found["1 toward the text"] == "The green object is a diamond." != plain == "The green object is a triangle."
    marked = page.locator("#answer1 .differs").all_inner_texts()
    assert marked == ["diamond."]  # the one word that is not the plain answer's
    assert page.locator("#answer3 .differs").count() == 0
    page.locator("#whose label", has_text="1 toward the text").first.click()
    assert "toward text, strength 1" in page.locator("#card-applied").inner_text()
    assert page.locator("#card-modality .dash").count() >= 1  # the plain answer's, beside it
    page.locator("#whose label", has_text="Not steered").click()
    assert "Nothing: this is the plain model." in page.locator("#card-applied").inner_text()


def test_one_click_asks_with_one_intervention_after_another(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    page.locator("#asked-sage-see").check()
    page.locator("#asked-sage-see-alpha").fill("0.3")
    page.locator("#compare-row summary").click()
    page.get_by_text("Interventions", exact=True).click()
    compared = ["toward the image", "toward the text", "See", "Generate", "VCD"]
    for name in page.locator("#compared input").evaluate_all("inputs => inputs.map((input) => input.value)"):
        if name not in compared:
            page.locator(f"#compared input[value='{name}']").uncheck()
    asked = compare(page)
    said = {
        json.dumps({name: body[name] for name in ("steering", "sage", "contrast") if name in body}) for body in asked
    }
    off = {"see": False, "think": False, "generate": False}
    assert said == {
        json.dumps(one)
        for one in (
            {},
            {"steering": {"toward": "vision", "strength": 1}},
            {"steering": {"toward": "text", "strength": 1}},
            {"sage": {**off, "see": {"alpha": 0.3}}},
            {"sage": {**off, "generate": True}},
            {"contrast": {"kind": "vcd"}},
        )
    }
    assert list(answers(page)) == ["Plain", *compared]


def test_what_cannot_be_compared_is_told(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    page.locator("#compare-row summary").click()
    for text, told in (
        ("0.5, many", "“many” is not a number"),
        ("1", "choose at least two"),
        ("0 1 2 3 4 5 6 7 8", "At most 8"),
    ):
        page.locator("#strengths").fill(text)
        page.locator("#compare").click()
        page.locator("#error").get_by_text(told).wait_for()
    page.locator("#strengths").fill("−1; 1")  # as a text program writes a minus
    assert {body["steering"]["toward"] for body in compare(page)} == {"text", "vision"}
    assert page.locator("#error").is_hidden()


def test_two_answers_mark_each_others_words(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    assert send(page) == "The star is yellow."
    assert page.locator("#answer-words .differs").all_inner_texts() == ["yellow."]
    assert page.locator("#base-words .differs").all_inner_texts() == ["green."]
    assert "text changed" in page.locator("#answer-meta").inner_text()


def test_they_stream_side_by_side(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    go_on = threading.Event()
    fake = FakeEngine("Hel", go_on, "lo")
    fake.numbers |= {"slots": 8}
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#compare:enabled").wait_for()
    page.locator("#question").fill("hi")
    page.locator("#compare").click()
    until(page, "[...document.querySelectorAll('#answers .text')].filter((p) => p.textContent === 'Hel').length === 5")
    total = page.locator("#answers article").count()
    # Plain and each intervention that needs no vector; those without a connection yet wait.
    assert total == 1 + len(WITHOUT_VECTOR)
    go_on.set()
    page.wait_for_selector("#answers:not([aria-busy])")
    assert set(answers(page).values()) == {"Hello"}
    assert {"VISTA", "ONLY", "OPERA", "DoLa"} < set(answers(page))  # as their papers write them
    assert len(fake.requests) == total


def test_one_that_breaks_off_leaves_the_others(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    opened = visit()
    opened.expected = ("400",)
    page = opened.page
    page.goto(live(create_app(Settings(journal="off"), engine=FakeEngine())))  # type: ignore[arg-type]
    page.locator("#compare:enabled").wait_for()

    def refused(route: Any) -> None:
        if route.request.post_data_json.get("contrast"):
            route.fulfill(status=400, json={"error": {"message": "No contrast today.", "param": "contrast"}})
        else:
            route.continue_()

    page.route("**/v1/chat/completions", refused)
    page.locator("#question").fill("hi")
    page.locator("#compare").click()
    page.wait_for_selector("#answers:not([aria-busy])")
    contrasts = [kind for kind in WITHOUT_VECTOR if kind.path[0] == "contrast"]
    assert page.get_by_text("Broken off: No contrast today.").count() == len(contrasts)
    assert page.locator("#answers .text", has_text="Hello world").count() == 1 + len(WITHOUT_VECTOR) - len(contrasts)
    assert page.locator("#error").is_hidden()
