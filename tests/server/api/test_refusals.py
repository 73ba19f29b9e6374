"""Refusals name in a few words all that is wrong with a request, however much that is."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

from tests.server.conftest import ask, data_uri, user

LONG = "y" * 100_000
BIG = 10**4000
SMALL = data_uri().partition(",")[2]
IMAGE = f"data:image/{LONG};base64,AAAA"


def part(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **fields}]}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"diagnostics": {"include": [LONG, LONG]}}, "diagnostics.include"),
        ({"diagnostics": {"include": ["patches"], "layers": list(range(5000, 15_000))}}, "diagnostics.layers"),
        ({"diagnostics": {"include": ["patches"], "layers": [BIG]}}, "diagnostics.layers"),
        ({"diagnostics": {"include": ["patches"], "layers": {"last": BIG}}}, "diagnostics.layers"),
        ({"diagnostics": {"layers": LONG}}, "diagnostics.layers"),
        ({"diagnostics": {"spans": LONG}}, "diagnostics.spans"),
        ({"diagnostics": {"residual_rows": LONG}}, "diagnostics.residual_rows"),
        ({"diagnostics": {"drift_rows": LONG}}, "diagnostics.drift_rows"),
        ({"diagnostics": {"compare_to": LONG}}, "diagnostics.compare_to"),
        ({"logit_bias": {"9" * 4000: 1}}, "logit_bias.9"),
        ({"logit_bias": {LONG: 1}}, "logit_bias.y"),
        ({"steering": {"layers": list(range(10**15, 10**15 + 1000))}}, "steering.layers"),
        ({"steering": {"layers": [1] * 1000}}, "steering.layers"),
        ({"steering": {"apply": {"tokens": LONG}}}, "steering.apply.tokens"),
        ({"steering": {"vector": LONG}}, "steering.vector"),
        ({"steering": {LONG: 1}}, "steering.y"),
        ({"sage": {"see": {"shallow": BIG}}}, "sage.see.shallow"),
        ({"sage": {"see": {LONG: BIG}}}, "sage.see.y"),
        ({"contrast": {"kind": "pai", "first_layer": BIG}}, "contrast.first_layer"),
        ({"contrast": {"kind": LONG}}, "contrast.kind"),
        ({"diagnostics": ["focus"] * 10_000}, "diagnostics"),
        ({"model": LONG}, "model"),
        ({"seed": BIG}, "seed"),
        ({"stop": [LONG]}, "stop"),
        ({"metadata": {LONG: "a"}}, "metadata"),
        (part(span=LONG), "messages[0].content[0].span"),
        (part(type=LONG), "messages[0].content[0]"),
        ({"messages": [{"role": LONG, "content": "hi"}]}, "messages[0]"),
        ({"messages": [user(IMAGE)]}, "messages[0].content[0].image_url"),
    ],
)
def test_a_message_repeats_little_of_the_request(fields: dict[str, Any], param: str, client: FlaskClient) -> None:
    answer = ask(client, data_uri(), "What is it?", **fields)
    assert answer.status_code in (400, 404), answer.text[:1000]
    assert answer.json["error"]["param"].startswith(param)
    assert len(answer.data) < 1000


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "'max_tokens' must be at least 1; got 0."),
        (
            {"contrast": {"kind": "vdc"}},
            "contrast.kind",
            "'contrast.kind' must be one of vcd, icd, pai, m3id, agla; got 'vdc'; did you mean 'vcd'?",
        ),
        (
            {"contrast": {"kind": "none"}},
            "contrast.kind",
            "'contrast.kind' must be one of vcd, icd, pai, m3id, agla; got 'none'.",
        ),
        ({"contrast": {}}, "contrast.kind", "'contrast.kind' must be one of vcd, icd, pai, m3id, agla."),
        (
            {"diagnostics": ["focus", "tam"]},
            "diagnostics",
            """'diagnostics' must be true, false or an object, such as {"include": ["focus", "tam"]}.""",
        ),
        (
            {"diagnostics": [5]},
            "diagnostics",
            """'diagnostics' must be true, false or an object, such as {"include": ["focus"]}.""",
        ),
    ],
)
def test_a_message_says_what_is_meant(fields: dict[str, Any], param: str, message: str, client: FlaskClient) -> None:
    error = ask(client, data_uri(), "What is it?", **fields).json["error"]
    assert (error["param"], error["message"]) == (param, message)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages/count_tokens", "/v1/steering/validate"])
def test_a_request_with_too_many_images_says_how_many_it_has(path: str, client: FlaskClient) -> None:
    picture = {"type": "image_url", "image_url": {"url": data_uri()}}
    if "count_tokens" in path:
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SMALL}}
    body = {"model": "helmsight-demo", "messages": [{"role": "user", "content": [picture] * 19}]}
    error = client.post(path, json=body).json["error"]
    assert (error["param"], error["code"]) == ("messages", "too_many_images")
    assert error["message"] == "A request may hold at most 16 images; this one has 19."
