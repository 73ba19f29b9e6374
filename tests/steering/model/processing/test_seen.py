"""Pictures that were processed before, compared with what transformers' processor makes of them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering.model.processing.raw_pixels import RawPixels
from steering.model.processing.seen import CAPACITY
from steering.prompt.layout import Prompt, build_prompt
from tests import families
from tests.steering.conftest import LoadMLLM

SEVERAL = [family for family in families.FAMILIES if family not in families.IMAGE_ONLY]


@pytest.fixture
def mllm(root: Path) -> steering.MLLM:
    """Load a model of the test's own, which has seen nothing."""
    return steering.load(families.checkpoint("qwen2_vl", root), device="cpu")


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[Image.Image]:
    """Record the pictures that are processed."""
    pictures: list[Image.Image] = []
    real = RawPixels.picture

    def record(self_: RawPixels, image: Image.Image, arguments: Any) -> Any:
        pictures.append(image)
        return real(self_, image, arguments)

    monkeypatch.setattr(RawPixels, "picture", record)
    return pictures


def picture(shade: int, size: tuple[int, int] = (84, 56)) -> Image.Image:
    return Image.linear_gradient("L").resize(size).convert("RGB").point(lambda level: (level + 40 * shade) % 256)


def chat(*pictures: Image.Image, **bounds: int) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture, **bounds} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def same(first: Prompt, second: Prompt) -> bool:
    assert first.inputs.keys() == second.inputs.keys()
    for a, b in zip(first.pictures, second.pictures, strict=True):
        assert a.tensors.keys() == b.tensors.keys()
        assert a.values == b.values
        assert all(torch.equal(a.read(name), b.read(name)) for name in a.tensors)
    return all(torch.equal(value, second.inputs[name]) for name, value in first.inputs.items())


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prompt_with_cached_pictures_is_the_same(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = load_mllm(family)
    monkeypatch.setattr(mllm.seen, "capacity", CAPACITY)  # of which the last engine that others made had a say
    chats = [chat(picture(0))]
    if family in SEVERAL:
        chats += [chat(picture(1), picture(0, (56, 112))), chat(picture(0), picture(1), picture(0))]
    with monkeypatch.context() as patched:  # as transformers has it
        patched.setattr(mllm.processor.image_processor, "__class__", type(mllm.processor.image_processor).__mro__[1])
        plain = [build_prompt(mllm, messages) for messages in chats]
    keys = []
    for _ in range(2):
        prompts = [build_prompt(mllm, messages) for messages in chats]
        assert all(map(same, prompts, plain))
        keys.append([picture.key for prompt in prompts for picture in prompt.pictures])
    assert keys[0] == keys[1]
    before = mllm.seen.hits, mllm.seen.misses
    for messages in chats:
        build_prompt(mllm, messages)
    assert (mllm.seen.hits - before[0], mllm.seen.misses - before[1]) == (6 if family in SEVERAL else 1, 0)


def test_each_picture_is_processed_once(mllm: steering.MLLM, processed: list[Image.Image]) -> None:
    first = build_prompt(mllm, chat(picture(0), picture(1), picture(0)))
    again = build_prompt(mllm, chat(picture(1), picture(2)))
    assert processed == [picture(0), picture(1), picture(2)]
    assert first.pictures[0] is first.pictures[2]
    assert again.pictures[0] is first.pictures[1]
    cached = [*first.pictures[:2], again.pictures[1]]
    assert mllm.seen.stats() == {
        "processed_images_hits": 2,
        "processed_images_misses": 3,
        "processed_images_bytes": sum(value.nbytes for picture in cached for value in picture.tensors.values()),
    }


def test_pixels_sizes_and_bounds_are_told_apart(mllm: steering.MLLM) -> None:
    requested = [
        chat(picture(0)),
        chat(picture(1)),
        chat(picture(0, (56, 84))),
        chat(picture(0), max_pixels=800),
        chat(picture(0), min_pixels=9000),
    ]
    for _ in range(2):
        assert len({build_prompt(mllm, chat_variant).pictures[0].key for chat_variant in requested}) == 5
    black = [Image.new("RGB", size) for size in ((56, 84), (84, 56))]  # whose pixels are the same
    assert [build_prompt(mllm, chat(size)).layout.images[0].grid for size in black] == [(4, 3), (3, 4)]


def test_the_least_recently_used_is_let_go_first(mllm: steering.MLLM, processed: list[Image.Image]) -> None:
    build_prompt(mllm, chat(picture(0)))
    mllm.seen.capacity = 2 * mllm.seen.bytes
    for shade in (1, 0, 2, 0, 1):  # 2 takes the place of 1, which takes that of 2
        build_prompt(mllm, chat(picture(shade)))
    assert (len(processed), mllm.seen.hits) == (4, 2)
    assert mllm.seen.bytes == mllm.seen.capacity
    build_prompt(mllm, chat(picture(3), min_pixels=40_000))  # more than all that is kept
    build_prompt(mllm, chat(picture(0)))
    assert mllm.seen.hits == 3
    mllm.seen.capacity = 0
    build_prompt(mllm, chat(picture(4)))
    assert mllm.seen.bytes == 0


def test_pictures_with_palettes_are_not_cached(mllm: steering.MLLM) -> None:
    def of(*palette: int) -> Image.Image:
        image = Image.new("P", (56, 56))
        image.putpalette(palette)
        return image

    red, blue = (build_prompt(mllm, chat(of(*palette))) for palette in ((255, 0, 0), (0, 0, 255)))
    assert red.pictures[0].key != blue.pictures[0].key
    assert mllm.seen.misses == 0


def test_other_calls_of_the_processor_bypass_the_cache(
    mllm: steering.MLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_prompt(mllm, chat(picture(0)))
    calls: list[Any] = []
    plain = type(mllm.processor.image_processor).__mro__[1]
    real = plain.preprocess
    monkeypatch.setattr(plain, "preprocess", lambda *args, **kwargs: calls.append(args) or real(*args, **kwargs))
    for _ in range(2):
        assert mllm.processor.image_processor(picture(0), return_tensors="np")["pixel_values"].shape == (48, 294)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="image"):
        mllm.processor.image_processor("a text")
    mllm.processor.save_pretrained(tmp_path)
    assert "seen" not in (tmp_path / "processor_config.json").read_text()


def test_many_threads_may_use_the_cache(mllm: steering.MLLM) -> None:
    plain = [build_prompt(mllm, chat(picture(shade))) for shade in range(4)]
    mllm.seen.capacity = mllm.seen.bytes // 2
    build_prompt(mllm, chat(picture(4)))
    wrong: list[int] = []

    def ask(first: int) -> None:
        for number in range(20):
            shade = (first + number) % 4
            if not same(build_prompt(mllm, chat(picture(shade))), plain[shade]):
                wrong.append(shade)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert mllm.seen.hits + mllm.seen.misses == 5 + 6 * 20
    assert 0 < mllm.seen.hits < 6 * 20
    assert mllm.seen.bytes <= mllm.seen.capacity
