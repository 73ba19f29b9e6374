"""A dry run takes and reports everything that a request may ask for, and answers nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

import steering
from steering.protocol.forms import forms
from steering.protocol.intervention import REGISTRY
from steering.protocol.readout import REGISTRY as READOUTS
from tests.server.conftest import ask, data_uri
from tests.server.vectors.uploads import QUESTION, validate

PICTURE = {"type": "image_url", "image_url": {"url": data_uri()}}
ASKED = {"role": "user", "content": [PICTURE, {"type": "text", "text": QUESTION}]}
UNSEEN = {"role": "user", "content": QUESTION}


def places(report: dict[str, Any]) -> set[str]:
    """Return the interventions of a dry run's report, or of `applied`, by their paths."""
    groups = {kind.path[0] for kind, _ in REGISTRY.values() if len(kind.path) > 1}
    return {
        place
        for head, said in report.items()
        for place in ([f"{head}.{name}" for name, own in said.items() if own] if head in groups else [head])
    }


@pytest.mark.parametrize("name", sorted(forms()))
def test_every_intervention_is_reported_with_its_settings(name: str, open_client: FlaskClient) -> None:
    field = {name: forms()[name].example}
    report = validate(open_client, messages=[ASKED], **field).json
    answer = ask(open_client, data_uri(), QUESTION, max_tokens=1, **field).json
    applied = answer["choices"][0]["applied"]
    assert places(report["interventions"]) == places(applied)
    assert report["interventions"].keys() == applied.keys()
    for place in places(applied):
        head, *rest = place.split(".")
        asked = forms()[head].read(field[name])
        (own,) = [one for one in asked if [*one.path[1:]] == rest]
        settings = report["interventions"][head]
        assert (settings[rest[0]] if rest else settings) == own.settings()
    assert report["prompt_tokens"] == answer["usage"]["prompt_tokens"]


def test_readouts_sampling_and_the_rest_are_reported(open_client: FlaskClient) -> None:
    report = validate(
        open_client,
        messages=[ASKED],
        diagnostics={"include": sorted(READOUTS), "target_image": 1, "causal": True},
        baseline=True,
        n=2,
        temperature=0.5,
        stop="end",
        max_tokens=3,
    ).json
    # `decay_layers` is part of another readout, and `heatmaps` has an option of its own.
    assert set(report["diagnostics"]["include"]) == set(READOUTS)
    assert (report["diagnostics"]["target_image"], report["diagnostics"]["causal"]) == (1, True)
    assert (report["baseline"], report["n"], report["max_tokens"]) == (True, 2, 3)
    assert report["sampling"]["temperature"] == 0.5
    assert report["sampling"]["stop"] == ["end"]
    assert (report["steering"], report["interventions"]) == ([], {})
    cheap = validate(open_client, diagnostics=True).json
    assert cheap["diagnostics"] == {"include": sorted(name for name, one in READOUTS.items() if one.cheap)}
    assert (cheap["prompt_tokens"], cheap["max_tokens"]) == (None, None)
    assert validate(open_client, messages=[UNSEEN]).json["diagnostics"] is None
    forced = validate(open_client, messages=[UNSEEN], force="It is red.").json
    assert (forced["force"], forced["grammar"], forced["tools"]) == (True, False, [])
    assert validate(open_client, messages=[UNSEEN], response_format={"type": "json_object"}).json["grammar"] is True


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (UNSEEN, {"sage": True}),
        (UNSEEN, {"contrast": {"kind": "vcd"}}),
        (ASKED, {"contrast": {"kind": "vcd"}, "sage": True}),
        (ASKED, {"look_at": {"image": 2}}),
        (ASKED, {"look_at": {"layers": [99]}}),
        (ASKED, {"look_at": {"banana": 1}}),
        (ASKED, {"project_out": {"vector": "nobody"}}),
        (ASKED, {"dola": {"premature": [99]}}),
        (ASKED, {"diagnostics": {"include": ["nothing"]}}),
        (ASKED, {"diagnostics": {"target_image": 2}}),
        (ASKED, {"diagnostics": {"compare_to": "chatcmpl-unknown"}}),
        (ASKED, {"steering": {"toward": "auto"}}),
        (ASKED, {"n": 99}),
        (ASKED, {"temperature": -1}),
        (ASKED, {"min_tokens": 5, "max_tokens": 3}),
        (ASKED, {"model": "other"}),
        ({"role": "user", "content": [PICTURE] * 40}, {}),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, {}),
        ({"role": "user", "content": "word " * 5000}, {"max_tokens": 8}),
    ],
)
def test_its_errors_are_those_of_a_chat(
    message: dict[str, Any], fields: dict[str, Any], open_client: FlaskClient
) -> None:
    chat = open_client.post("/v1/chat/completions", json={"messages": [message], **fields})
    dry = validate(open_client, messages=[message], **fields)
    assert (dry.status_code, dry.json) == (chat.status_code, chat.json)
    assert dry.status_code in (400, 404)


def test_a_preset_skips_what_it_would_skip(open_client: FlaskClient, engine: steering.Engine) -> None:
    fields = {"model": f"{engine.mllm.name}@sage", "messages": [UNSEEN], "max_tokens": 1}
    dry = validate(open_client, **fields).json
    chat = open_client.post("/v1/chat/completions", json=fields).json
    assert chat is not None
    assert dry["skipped"] == chat["choices"][0]["applied"]["skipped"]
    assert [one["field"] for one in dry["skipped"]] == ["sage.see", "sage.generate"]
    assert dry["preset"] == "sage"
    assert places(dry["interventions"]) == {"sage.think"}


def test_toward_vision_without_an_image_is_warned_of(open_client: FlaskClient) -> None:
    """Without a direction it is toward vision, too."""
    for steering_field in (True, {"strength": 0.5}, {"vectors": [{"name": "modality-preference", "scale": -0.5}]}):
        expected = "it prefers vision, but the request holds no image"
        answer = open_client.post(
            "/v1/chat/completions", json={"messages": [UNSEEN], "steering": steering_field, "max_tokens": 1}
        ).json
        assert answer is not None
        (applied,) = answer["choices"][0]["applied"]["steering"]
        assert applied["warning"] == expected
        assert (
            validate(open_client, messages=[UNSEEN], steering=steering_field).json["steering"][0]["warning"] == expected
        )
        assert validate(open_client, messages=[ASKED], steering=steering_field).json["steering"][0]["warning"] is None
        assert validate(open_client, steering=steering_field).json["steering"][0]["warning"] is None  # not known
        (applied,) = ask(open_client, data_uri(), QUESTION, steering=steering_field, max_tokens=1).json["choices"][0][
            "applied"
        ]["steering"]
        assert applied["warning"] is None
    for other in ({"toward": "text"}, {"strength": 0}):
        answer = open_client.post(
            "/v1/chat/completions", json={"messages": [UNSEEN], "steering": other, "max_tokens": 1}
        ).json
        assert answer is not None
        assert answer["choices"][0]["applied"]["steering"][0]["warning"] is None


def test_nothing_is_generated_and_nothing_fetched(make_app: Callable[..., Flask], engine: steering.Engine) -> None:
    open_client = make_app(allow_remote_images=True).test_client()
    validate(open_client, steering=True)  # measures the model's magnitudes, once
    before = engine.stats()
    away = {"type": "image_url", "image_url": {"url": "https://host.invalid/a.png"}}
    message = {"role": "user", "content": [away, {"type": "text", "text": QUESTION}]}
    report = validate(open_client, messages=[message], sage=True, diagnostics={"target_image": 1}).json
    assert places(report["interventions"]) == {"sage.see", "sage.think", "sage.generate"}
    assert report["prompt_tokens"] is None  # of the picture as it will be
    validate(open_client, messages=[ASKED], sage=True, steering={"toward": "auto"}, strict=False)
    after = engine.stats()
    assert {name: after[name] for name in ("steps", "prompt_tokens", "generated_tokens")} == {
        name: before[name] for name in ("steps", "prompt_tokens", "generated_tokens")
    }
