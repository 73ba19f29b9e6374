"""The pixel bounds of a picture act like the processor's own bounds, picture by picture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image

from steering import Request, RequestError, Sampling
from steering.model.images import Picture
from steering.model.processing.pixels import PixelBounds
from steering.prompt.layout import build_prompt
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain, MakeEngine

FAMILY = "qwen2_vl"  # 28 x 28 to 56 x 56 pixels, tokens of 14 x 14


def chat(*pictures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a question about several copies of one picture."""
    image = families.example_image(0).resize((70, 49), Image.Resampling.NEAREST)
    parts = [{"type": "image", "image": image, **bounds} for bounds in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize(
    ("bounds", "size", "grid"),
    [
        ({"max_pixels": 800}, {"shortest_edge": 784, "longest_edge": 800}, (1, 2)),
        ({"max_pixels": 400}, {"shortest_edge": 400, "longest_edge": 400}, (1, 1)),  # below the processor's own least
        ({"min_pixels": 9000}, {"shortest_edge": 9000, "longest_edge": 9000}, (6, 9)),  # beyond its own most
        ({"min_pixels": 1, "max_pixels": 10_000_000}, {"shortest_edge": 1, "longest_edge": 10_000_000}, (4, 5)),
    ],
)
def test_it_is_what_the_processor_makes_within_these_bounds(
    load_mllm: LoadMLLM, load_plain: LoadPlain, family: str, bounds: dict[str, int], size: dict[str, int], grid: Any
) -> None:
    prompt = build_prompt(load_mllm(family), chat(bounds))
    (picture,) = chat({})[0]["content"][:1]
    frames = 2 if family == "glm4v" else 1  # whose processor counts the pixels of both
    size = {name: frames * value for name, value in size.items()}
    plain = load_plain(family).processor.image_processor(picture["image"], size=size, return_tensors="pt")
    assert torch.equal(prompt.inputs["pixel_values"], plain["pixel_values"])
    assert prompt.layout.images[0].grid == grid
    assert (prompt.inputs["image_grid_thw"][0, 1:] // 2).tolist() == list(grid)


@pytest.mark.parametrize("mode", ["P", "1", "L", "RGBA", "HSV"])
def test_a_picture_becomes_rgb_before_it_is_resized(load_mllm: LoadMLLM, load_plain: LoadPlain, mode: str) -> None:
    messages = chat({"max_pixels": 800})
    part = messages[0]["content"][0]
    part["image"] = part["image"].convert(mode)
    size = {"shortest_edge": 784, "longest_edge": 800}
    plain = load_plain(FAMILY).processor.image_processor(part["image"], size=size, return_tensors="pt")
    assert torch.equal(build_prompt(load_mllm(FAMILY), messages).inputs["pixel_values"], plain["pixel_values"])


def test_the_processors_filter_resizes(load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = load_plain(FAMILY).processor
    monkeypatch.setattr(processor.image_processor, "resample", Image.Resampling.BILINEAR)
    bounds, image = PixelBounds.of(processor), families.example_image(0).resize((70, 49))
    assert bounds is not None
    (width, height), drawn = bounds.size(image, None, 800), bounds.sized(image, None, 800)
    assert drawn.tobytes() == image.resize((width, height), Image.Resampling.BILINEAR).tobytes()


def test_a_processor_without_a_filter_has_bounds(load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = load_plain(FAMILY).processor
    monkeypatch.setattr(processor.image_processor, "do_resize", False)
    monkeypatch.setattr(processor.image_processor, "resample", None)
    assert PixelBounds.of(processor) is not None


def test_each_picture_has_its_own_and_keys_of_the_cache_tell_them_apart(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(FAMILY)
    alone = [build_prompt(mllm, chat(bounds)) for bounds in ({}, {"max_pixels": 800}, {"min_pixels": 9000})]
    together = build_prompt(mllm, chat({}, {"max_pixels": 800}, {"min_pixels": 9000}))
    assert [image.grid for image in together.layout.images] == [one.layout.images[0].grid for one in alone]
    keys = [picture.key for picture in together.pictures]
    assert keys == [one.pictures[0].key for one in alone]
    assert len(set(keys)) == 3
    assert isinstance(together.pictures[0], Picture)


def test_answers_are_those_of_a_picture_of_that_size_also_in_one_batch(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY)
    sampling = Sampling(max_tokens=5, ignore_eos=True, logprobs=0)
    bounded, own = Request(chat({"max_pixels": 800}), sampling), Request(chat({}), sampling)
    small = chat({})
    small[0]["content"][0]["image"] = small[0]["content"][0]["image"].resize((28, 14), Image.Resampling.BICUBIC)
    small[0]["content"][0]["max_pixels"] = 28 * 14
    first, other = engine.generate([bounded, own])
    (drawn,) = engine.generate([Request(small, sampling)])
    assert first.prompt_tokens == drawn.prompt_tokens < other.prompt_tokens
    assert first.choices[0].token_ids == drawn.choices[0].token_ids
    found, expected = ([one.logprob for one in result.choices[0].logprobs or ()] for result in (first, drawn))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("bounds", "param"),
    [
        ({"max_pixels": 0}, "max_pixels"),
        ({"min_pixels": 1.5}, "min_pixels"),
        ({"min_pixels": 2000, "max_pixels": 1000}, "min_pixels"),
    ],
)
def test_what_bounds_nothing_is_refused(bounds: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        Request(chat(bounds))
    assert refused.value.param == f"messages[0].content[0].{param}"


def test_a_model_that_sizes_pictures_otherwise_refuses_them(load_mllm: LoadMLLM) -> None:
    for family in ("llava", "internvl"):
        assert load_mllm(family).pixels is None
        with pytest.raises(RequestError, match="cannot be told how many pixels"):
            build_prompt(load_mllm(family), chat({"max_pixels": 800}))
