"""Pictures that do not fit beside the text and the answer share what is left, in proportion to their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from steering import ContextOverflow, Icd, Request, Sampling, Vcd
from steering.front.input_processor import Limits, admit, read_prompt
from steering.messages import serialization
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain, MakeEngine

FAMILY = "qwen2_5_vl"  # a token is 14 x 14 pixels
LIMIT = 200


def picture(width: int, height: int, index: int = 0, **more: Any) -> dict[str, Any]:
    """Return a picture with as many tokens as its pixels say, since the bounds are wide."""
    image = families.example_image(index).resize((width, height), Image.Resampling.NEAREST)
    return {"type": "image", "image": image, "min_pixels": 14 * 14, "max_pixels": 10_000_000, **more}


def chat(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def asked(*parts: dict[str, Any], max_tokens: int = 20, **more: Any) -> Request:
    return Request(chat(*parts), Sampling(max_tokens=max_tokens, ignore_eos=True), **more)


@pytest.mark.parametrize("family", [FAMILY, "qwen3_vl", "glm4v"])
def test_a_picture_that_is_too_large_takes_what_is_left(family: str, load_mllm: LoadMLLM) -> None:
    prompt = read_prompt(load_mllm(family), asked(picture(1400, 700)), LIMIT)
    (shrunk,) = prompt.shrunk
    assert shrunk.before == (1400, 700)
    width, height = shrunk.after
    assert width / height == pytest.approx(2, rel=0.1)
    assert prompt.layout.images[0].tokens == width * height // 14**2
    left = LIMIT - 20 - (prompt.length - prompt.layout.images[0].tokens)
    assert 0.8 * left <= prompt.layout.images[0].tokens <= left


def test_the_model_sees_the_picture_as_resized_by_hand(load_mllm: LoadMLLM, load_plain: LoadPlain) -> None:
    prompt = read_prompt(load_mllm(FAMILY), asked(picture(1400, 700)), LIMIT)
    by_hand = picture(1400, 700)["image"].resize(prompt.shrunk[0].after, Image.Resampling.BICUBIC)
    area = {"shortest_edge": 1, "longest_edge": 10_000_000}
    plain = load_plain(FAMILY).processor.image_processor(by_hand, size=area, return_tensors="pt")
    assert torch.equal(prompt.inputs["pixel_values"], plain["pixel_values"])


def test_several_share_in_proportion_to_their_tokens(load_mllm: LoadMLLM) -> None:
    prompt = read_prompt(load_mllm(FAMILY), asked(picture(1400, 700), picture(700, 350, 1)), 400)
    large, small = (image.tokens for image in prompt.layout.images)
    assert large / small == pytest.approx(4, rel=0.25)
    assert prompt.length <= 380
    assert [one.number for one in prompt.shrunk] == [0, 1]


def test_a_chat_that_goes_on_sees_them_in_the_same_sizes_for_some_turns(load_mllm: LoadMLLM) -> None:
    request = asked(picture(1400, 700), max_tokens=40)
    first = read_prompt(load_mllm(FAMILY), request, 400)
    longer = [*request.messages, {"role": "assistant", "content": "Red."}, {"role": "user", "content": "And?"}]
    second = read_prompt(load_mllm(FAMILY), Request(longer, request.sampling), 400)
    assert second.length > first.length
    assert second.shrunk == first.shrunk
    assert second.pictures[0].key == first.pictures[0].key


def test_what_fits_stays_as_it_is(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(FAMILY)
    whole = read_prompt(mllm, asked(picture(140, 98)), LIMIT)
    assert whole.shrunk == ()
    exactly = read_prompt(mllm, asked(picture(140, 98)), whole.length + 20)
    assert exactly.shrunk == ()
    assert exactly.layout.images[0].tokens == 70
    assert read_prompt(mllm, asked(picture(140, 98)), whole.length + 19).shrunk != ()


def test_one_of_high_detail_keeps_its_size_and_is_refused_where_it_does_not_fit(load_mllm: LoadMLLM) -> None:
    mllm, limits = load_mllm(FAMILY), Limits(LIMIT, 4, 1)
    with pytest.raises(ContextOverflow):
        admit(mllm, asked(picture(1400, 700, detail="high")), limits)
    prompt = read_prompt(mllm, asked(picture(140, 98, detail="high"), picture(1400, 700, 1)), LIMIT)
    assert prompt.layout.images[0].tokens == 70
    assert [one.number for one in prompt.shrunk] == [1]
    assert prompt.length <= LIMIT - 20


def test_none_is_made_smaller_than_the_request_wants_it(load_mllm: LoadMLLM) -> None:
    with pytest.raises(ContextOverflow):
        admit(load_mllm(FAMILY), asked(picture(1400, 700, min_pixels=500_000)), Limits(LIMIT, 4, 1))


@pytest.mark.parametrize("max_tokens", [None, 5_000])
def test_an_answer_without_a_bound_is_left_its_part(load_mllm: LoadMLLM, max_tokens: int | None) -> None:
    request = Request(chat(picture(1400, 700)), Sampling(max_tokens=max_tokens), clamp=True)
    admitted = admit(load_mllm(FAMILY), request, Limits(LIMIT, 4, 1))
    assert admitted.max_tokens >= LIMIT // 4
    assert admitted.prompt.layout.images[0].tokens > LIMIT // 4


@pytest.mark.parametrize("interventions", [Vcd(), Icd(), ()])
def test_baselines_and_twins_fit_and_see_the_same(load_mllm: LoadMLLM, interventions: Any) -> None:
    request = asked(picture(1400, 700), interventions=interventions, baseline=True)
    admitted = admit(load_mllm(FAMILY), request, Limits(LIMIT, 4, 1))
    own = admitted.prompt.inputs["image_grid_thw"]
    assert torch.equal(admitted.baseline_prompt.inputs["image_grid_thw"], own)
    if interventions == Vcd() and admitted.twin_prompt is not None:
        assert torch.equal(admitted.twin_prompt.inputs["image_grid_thw"], own)


def test_both_sizes_stand_in_the_report(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, max_length=LIMIT)
    first, second = engine.generate([asked(picture(1400, 700)), asked(picture(56, 56))])
    applied = first.choices[0].applied
    assert applied is not None
    (said,) = applied["pictures"]
    assert (said["image"], said["from"]) == (1, [1400, 700])
    assert said["to"][0] < 1400
    assert second.choices[0].applied is None


def test_a_prompt_that_another_process_read_keeps_them(load_mllm: LoadMLLM) -> None:
    prompt = read_prompt(load_mllm(FAMILY), asked(picture(1400, 700)), LIMIT)
    sent = serialization.read(serialization.written(prompt))
    assert sent.shrunk == prompt.shrunk
