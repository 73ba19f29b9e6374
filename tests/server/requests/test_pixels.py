"""The size that pictures are scaled to, by the request's own bounds and by `detail`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.app import create_app
from server.settings import PresetTable, Settings
from tests import families
from tests.server.api.choices import choice_of, refused
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine


@pytest.fixture
def client(fake: FakeEngine) -> FlaskClient:  # of a model that takes bounds
    fake.can(pixels=(3136, 12_845_056))
    settings = Settings(max_image_pixels=1_000_000, max_request_pixels=1_500_000, vectors=())
    return create_app(settings, engine=fake).test_client()  # type: ignore[arg-type]


def shown(url: str = "", detail: Any = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url or data_uri(), "detail": detail}}


def bounds(fake: FakeEngine) -> list[dict[str, int]]:
    """Return the pixel bounds of each picture of the engine's last request."""
    parts = [part for message in fake.requests[-1].messages for part in message["content"]]
    return [{name: part[name] for name in part if name.endswith("_pixels")} for part in parts if "image" in part]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"max_pixels": 50_000}, {"max_pixels": 50_000}),
        ({"mm_processor_kwargs": {"min_pixels": 4000, "max_pixels": 5000}}, {"min_pixels": 4000, "max_pixels": 5000}),
        ({"min_pixels": 4000, "mm_processor_kwargs": {"max_pixels": 5000}}, {"min_pixels": 4000, "max_pixels": 5000}),
        ({"max_pixels": None, "mm_processor_kwargs": {}}, {}),
    ],
)
def test_the_engine_gets_what_is_asked_of_every_picture(
    client: FlaskClient, fake: FakeEngine, fields: dict[str, Any], expected: dict[str, int]
) -> None:
    assert ask(client, data_uri(), data_uri(), "?", **fields).status_code == 200
    assert bounds(fake) == [expected] * 2


def test_detail_is_of_one_picture(client: FlaskClient, fake: FakeEngine) -> None:
    details = ["low", "high", "auto", None, "original"]
    parts = [shown(detail=one) for one in details]
    low = {"max_pixels": 512 * 512}
    assert ask(client, messages=[{"role": "user", "content": parts}]).status_code == 200
    assert bounds(fake) == [low, {}, {}, {}, {}]
    flat = {"type": "input_image", "image_url": data_uri(), "detail": "low"}
    for given, expected in ((1000, 1000), (900_000, 512 * 512)):
        assert ask(client, messages=[{"role": "user", "content": [flat]}], max_pixels=given).status_code == 200
        assert bounds(fake) == [{"max_pixels": expected}]
    assert ask(client, messages=[{"role": "user", "content": [flat]}], min_pixels=300_000).status_code == 200
    assert bounds(fake) == [{"min_pixels": 300_000, "max_pixels": 300_000}]


@pytest.mark.parametrize("detail", [5, "Low", "medium", "", True, {"low": 1}, ["low"]])
def test_a_detail_that_does_not_exist_is_named(client: FlaskClient, detail: Any) -> None:
    said = "must be one of: low, high, auto, original"
    error = refused(ask(client, messages=[{"role": "user", "content": [shown(detail=detail)]}]))
    assert error["param"] == "messages[0].content[0]"
    assert error["message"].endswith(f"'image_url.detail' {said}; got {detail!r}.")
    flat = {"type": "input_image", "image_url": data_uri(), "detail": detail}
    assert f"'detail' {said}" in refused(ask(client, messages=[{"role": "user", "content": [flat]}]))["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_pixels": 0}, "max_pixels"),
        ({"max_pixels": 1.5}, "max_pixels"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels"),
        ({"max_pixels": 5, "mm_processor_kwargs": {"max_pixels": 6}}, "max_pixels"),
        ({"min_pixels": 5, "mm_processor_kwargs": {"max_pixels": 4}}, "min_pixels"),
        ({"mm_processor_kwargs": {"fps": 1}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"max_pixels": "1"}}, "mm_processor_kwargs.max_pixels"),
        ({"min_pixels": 1_000_001}, "min_pixels"),
    ],
)
def test_what_is_no_bound_is_refused(client: FlaskClient, fields: dict[str, Any], param: str) -> None:
    assert refused(ask(client, data_uri(), "?", **fields))["param"] == param


def test_small_pictures_cannot_be_made_larger_together_than_large_ones_may_be(client: FlaskClient) -> None:
    two = [data_uri(), data_uri()]
    assert ask(client, *two, min_pixels=750_000).status_code == 200
    error = refused(ask(client, *two, min_pixels=750_001))
    assert (error["param"], error["code"]) == ("min_pixels", "image_too_large")


def test_where_bounds_cannot_act_they_are_refused_by_name_and_detail_is_not(fake: FakeEngine) -> None:
    fake.can(image_size=(84, 84))
    presets = {"small": PresetTable(fields={"max_pixels": 5000})}
    client = create_app(Settings(vectors=(), presets=presets), engine=fake).test_client()  # type: ignore[arg-type]
    error = refused(ask(client, data_uri(), "?", max_pixels=5000))
    assert error["message"] == "'max_pixels': this model sees every image at 84 x 84 pixels."
    assert (error["param"], error["code"]) == ("max_pixels", "unsupported_value")
    content = [shown(detail="low"), {"type": "text", "text": "?"}]
    assert ask(client, messages=[{"role": "user", "content": content}]).status_code == 200
    assert bounds(fake) == [{}]
    for fields in ({"strict": False, "max_pixels": 5000}, {"model": "fake@small"}):
        (skipped,) = choice_of(ask(client, data_uri(), "?", **fields))["applied"]["skipped"]
        assert skipped["field"] == "max_pixels"
        assert bounds(fake) == [{}]


def test_a_real_model_gets_smaller_pictures(root: Path) -> None:
    mllm = steering.load(families.checkpoint("qwen2_vl", root), device="cpu")
    engine = steering.Engine(mllm, slots=2, max_length=512, self_check=False)
    engine.start()
    try:
        client = create_app(Settings(vectors=()), engine=engine).test_client()
        card = client.get("/v1/models").json["data"][0]  # type: ignore[index]
        assert (card["image_size"], card["image_pixels"]) == (None, [28 * 28, 56 * 56])
        tokens = {}
        for most in (None, 784, 196):
            answer = choice_of(ask(client, data_uri(), "?", max_pixels=most, max_tokens=2, diagnostics=True))
            (image,) = answer["diagnostics"]["images"]
            tokens[most] = image["tokens"]
        assert tokens == {None: 16, 784: 4, 196: 1}
    finally:
        engine.stop()


def test_a_picture_that_does_not_fit_is_scaled_down_and_one_of_high_detail_refused(root: Path) -> None:
    mllm = steering.load(families.checkpoint("qwen2_vl", root), device="cpu")
    engine = steering.Engine(mllm, slots=2, max_length=200, self_check=False)
    engine.start()
    try:
        client = create_app(Settings(vectors=()), engine=engine).test_client()
        url, text = data_uri(Image.new("RGB", (420, 280), "green")), {"type": "text", "text": "?"}
        fields = {"max_pixels": 1_000_000, "max_tokens": 20}
        messages = [{"role": "user", "content": [shown(url), text]}]
        response = ask(client, messages=messages, diagnostics=True, **fields)
        answer = choice_of(response)
        (told,) = answer["applied"]["pictures"]
        assert (told["image"], told["from"]) == (1, [420, 280])
        width, height = told["to"]
        (image,) = answer["diagnostics"]["images"]
        assert image["tokens"] == width * height // 14**2
        usage = response.json["usage"]  # type: ignore[index]
        assert 150 < usage["prompt_tokens"] <= 180
        high = [{"role": "user", "content": [shown(url, "high"), text]}]
        error = refused(ask(client, messages=high, **fields))
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    finally:
        engine.stop()
