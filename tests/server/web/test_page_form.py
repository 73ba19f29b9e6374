"""The form of the playground is drawn from the catalogue: interventions and readouts that the page has never heard of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit

NUDGE = {
    "description": "One logit is raised. `id` says\nwhich.\n\nRaises RequestError for values out of range.",
    "properties": {
        "amount": {"type": "number", "default": 100.0, "exclusiveMinimum": 0, "maximum": 1000},
        "id": {"type": "integer", "default": 5, "exclusiveMinimum": 1, "exclusiveMaximum": 9},
        "first_layer": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
        "quiet": {"type": "boolean", "default": False, "description": "Whether it is told."},
        "way": {"type": "string", "enum": ["up", "down"], "default": "up"},
        "mode": {"anyOf": [{"$ref": "#/$defs/Mode"}, {"type": "null"}], "default": None},
        "said": {"type": "string", "default": "hello", "maxLength": 9},
        "layers": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None},
    },
    "$defs": {"Mode": {"enum": ["soft", "hard"], "type": "string"}},
}
PLAIN = {"description": "Nothing to set", "properties": {}}
ALPHA = {"description": "A twin.", "properties": {"alpha": {"type": "number", "default": 1.0, "minimum": 0}}}
RED = {**ALPHA, "properties": {"kind": {"const": "red"}, **ALPHA["properties"]}, "required": ["kind"]}  # type: ignore[dict-item]
TOYS = [
    {"name": "nudge", "path": ["nudge"], "kind": "", "twin": False, "schema": NUDGE},
    {"name": "toys.spin", "path": ["toys", "spin"], "kind": "", "twin": False, "schema": PLAIN},
    {"name": "toys.twist", "path": ["toys", "twist"], "kind": "", "twin": True, "schema": ALPHA},
    {"name": "toys.hue.a", "path": ["toys", "hue"], "kind": "a", "twin": False, "schema": PLAIN},
    {"name": "shade.red", "path": ["shade"], "kind": "red", "twin": True, "schema": RED},
    {"name": "shade.blue", "path": ["shade"], "kind": "blue", "twin": False, "schema": PLAIN},
    {"name": "library", "path": ["library"], "kind": "", "twin": False, "schema": None},
]
"""Interventions as a catalogue has them.

One is alone, some are members of a group, some kinds exclude one another, and one has no field in requests.
"""


@pytest.fixture
def page(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> Any:
    """Return the playground of a server that has the toys and a readout called norm, and nothing else."""
    opened = visit()
    opened.expected = ("400",)

    def models(route: Any) -> None:
        found = route.fetch().json()
        found["data"][0] |= {"interventions": TOYS, "readouts": ["focus", "norm"]}
        route.fulfill(json=found)

    opened.page.route("**/v1/models", models)
    opened.page.goto(live(create_app(Settings(journal="off"), engine=FakeEngine())))  # type: ignore[arg-type]
    opened.page.locator("#asked-nudge").wait_for()
    opened.page.locator("#question").fill("hi")
    return opened.page


def option(page: Any, label: str) -> Any:
    """Return a field of the interventions by its label."""
    return page.locator("#interventions").get_by_label(label)


def asked(page: Any) -> dict[str, Any]:
    """Return the fields that the form adds to the chat itself, as the page shows them as code."""
    text = page.locator("#code-text").text_content()
    body: dict[str, Any] = json.loads(text[text.index("<<EOF\n") + 6 : text.rindex("\nEOF")])
    return {name: body[name] for name in body if name in ("nudge", "toys", "shade", "library", "baseline")}


def test_every_place_has_a_row_and_off_is_nothing(page: Any) -> None:
    assert page.locator("#interventions h2").all_inner_texts() == ["TOYS"]
    assert page.locator("#interventions .switch span").all_inner_texts() == ["Nudge", "Spin", "Twist"]
    assert page.locator("#interventions .switch small").first.inner_text() == "One logit is raised"
    assert option(page, "Shade").locator("option").all_inner_texts() == [
        "none",
        "RED",
        "BLUE",
    ]
    assert page.locator("#interventions .options:visible").count() == 0
    assert asked(page) == {}


def test_an_engine_that_cannot_steer_has_no_helm(page: Any) -> None:
    assert page.locator("#helm").is_disabled()
    assert page.locator("#helm-note").inner_text() == "The engine of this server does not support steering."


def test_options_are_fields_of_their_types(page: Any) -> None:
    option(page, "Nudge").check()
    assert asked(page) == {"nudge": True, "baseline": True}

    def attributes(name: str, *names: str) -> list[str | None]:
        return [page.locator(f"#asked-nudge-{name}").get_attribute(one) for one in names]

    assert attributes("amount", "type", "value", "min", "max") == ["number", "100", "0", "1000"]
    assert attributes("id", "type", "value", "min", "max", "step") == ["number", "5", "2", "8", "1"]
    assert attributes("first_layer", "type", "value", "min", "placeholder") == ["number", None, "0", "auto"]
    assert attributes("said", "type", "value", "maxlength") == ["text", "hello", "9"]
    assert attributes("layers", "type", "placeholder") == ["text", "auto, or a, b, c"]
    assert option(page, "way").locator("option").all_inner_texts() == ["up", "down"]
    assert option(page, "mode").locator("option").all_inner_texts() == [
        "none",
        "soft",
        "hard",
    ]


def test_options_are_explained_where_the_pointer_rests(page: Any) -> None:
    option(page, "Nudge").check()
    titles = [option(page, name).locator("xpath=..").get_attribute("title") for name in ("amount", "quiet", "way")]
    assert titles == ["above 0, at most 1000", "Whether it is told.", None]
    row = page.locator(".stage", has=page.locator("#asked-nudge"))
    assert row.get_attribute("title") == "One logit is raised. id says which."
    shade = page.locator(".stage", has=page.locator("#asked-shade"))
    assert not shade.get_attribute("title")
    option(page, "Shade").select_option("red")
    assert shade.get_attribute("title") == "A twin."


def test_what_is_changed_is_asked_for_and_defaults_are_the_servers(page: Any) -> None:
    option(page, "Nudge").check()
    option(page, "amount").fill("0.5")
    option(page, "first layer").fill("3")
    option(page, "quiet").check()
    option(page, "mode").select_option("hard")
    option(page, "said").fill("5")
    page.locator("#asked-nudge-layers").fill("[1, 2]")
    changed = {"amount": 0.5, "first_layer": 3, "quiet": True, "mode": "hard", "said": "5", "layers": [1, 2]}
    assert asked(page)["nudge"] == changed
    page.locator("#asked-nudge-layers").fill("1, 2")  # as a person writes it
    assert asked(page)["nudge"] == changed
    page.locator("#asked-nudge-layers").fill("[1,")
    assert asked(page)["nudge"]["layers"] == "[1,"  # the server says what is wrong with it
    option(page, "amount").fill("")
    option(page, "first layer").fill("")
    page.locator("#asked-nudge-layers").fill("")
    option(page, "mode").select_option("none")
    assert asked(page)["nudge"] == {"quiet": True, "said": "5"}
    option(page, "Nudge").uncheck()
    assert asked(page) == {}


def test_a_group_says_of_each_member_whether_it_is_on(page: Any) -> None:
    option(page, "Spin").check()
    assert asked(page)["toys"] == {"spin": True, "twist": False, "hue": False}
    option(page, "Twist").check()
    option(page, "alpha").fill("2")
    option(page, "Hue").select_option("a")
    assert asked(page)["toys"] == {"spin": True, "twist": {"alpha": 2}, "hue": {"kind": "a"}}


def test_kinds_exclude_one_another_and_so_do_those_with_a_twin(page: Any) -> None:
    shade = option(page, "Shade")
    shade.select_option("blue")
    assert asked(page)["shade"] == {"kind": "blue"}
    option(page, "Twist").check()
    assert asked(page) == {
        "shade": {"kind": "blue"},
        "toys": {"spin": False, "twist": True, "hue": False},
        "baseline": True,
    }
    shade.select_option("red")
    assert asked(page) == {"shade": {"kind": "red"}, "baseline": True}
    assert page.locator("#asked-shade-kind").count() == 0  # it is chosen before, and no option
    page.locator("#asked-shade-alpha").fill("0.5")
    assert asked(page)["shade"] == {"kind": "red", "alpha": 0.5}
    option(page, "Twist").check()
    assert asked(page) == {"toys": {"spin": False, "twist": True, "hue": False}, "baseline": True}
    assert shade.input_value() == ""


@pytest.mark.parametrize(
    ("param", "marked"),
    [("nudge.id", "asked-nudge-id"), ("nudge.nonsense", "asked-nudge"), ("shade.alpha", "asked-shade-alpha")],
)
def test_an_error_marks_the_field_that_it_is_about(page: Any, param: str, marked: str) -> None:
    option(page, "Nudge").check()
    option(page, "Shade").select_option("red")
    error = {"message": f"'{param}' is wrong.", "param": param}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": error}))
    page.get_by_role("button", name="Send").click()
    page.get_by_text("is wrong.").wait_for()
    assert page.locator("[aria-invalid]").evaluate_all("all => all.map((one) => one.id)") == [marked]


def test_everything_is_sent_and_a_readout_without_a_drawing_is_shown_in_numbers(page: Any) -> None:
    option(page, "Spin").check()
    option(page, "Shade").select_option("red")
    page.get_by_text("Sampling and readouts").click()
    assert page.get_by_role("checkbox", name="focus").is_checked()
    assert not page.get_by_role("checkbox", name="norm").is_checked()  # the page has no drawing of it
    page.get_by_role("checkbox", name="norm").check()
    norm = {"value": 2.5, "rows": "last", "by_layer": [1.0, None, 2.5], "left_out": {"a": 1}}
    choice = {
        "index": 0,
        "delta": {},
        "finish_reason": "stop",
        "applied": {
            "toys": {"spin": {"turns": 3}, "twist": None},
            "shade": {"kind": "red", "alpha": 0.25, "changed": 2},
        },
        "diagnostics": {"version": 2, "images": [], "rows": {}, "norm": norm, "focus": None},
    }
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )
    with page.expect_request("**/v1/chat/completions") as caught:
        page.get_by_role("button", name="Send").click()
    page.locator("#card-norm").wait_for()
    sent = caught.value.post_data_json
    assert (sent["toys"], sent["shade"]) == ({"spin": True, "twist": False, "hue": False}, {"kind": "red"})
    assert sent["diagnostics"] == {"include": ["focus", "norm"]}
    assert page.locator("#answer-chips .chip").all_inner_texts() == ["Spin", "RED"]
    card = page.locator("#card-norm")
    assert card.locator("dl.numbers div").all_inner_texts() == ["value\n2.50", "rows\nlast"]
    assert card.locator(".line").count() == 1
    applied = page.locator("#card-applied .applied div").all_inner_texts()
    assert applied == ["Spin\nturns 3", "RED\nalpha 0.250, changed 2 tokens"]
