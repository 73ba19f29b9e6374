"""Prompts that the worker's process reads, compared with those that the engine would read itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering import ContextOverflow, Diagnose, Request, Sampling
from steering.front import input_processor
from steering.front.input_processor import read_prompt
from steering.messages import serialization
from steering.prompt.layout import Prompt, build_prompt
from tests import families
from tests.steering.child.conftest import Apart, alone

Make = Callable[..., Apart]


def picture(colour: str = "red", size: tuple[int, int] = (84, 56)) -> dict[str, Any]:
    return {"type": "image", "image": Image.new("RGB", size, colour)}


def about(*parts: dict[str, Any], **fields: Any) -> Request:
    text = {"type": "text", "text": "Text context: It is green.\nWhat is it?"}
    return Request([{"role": "user", "content": [*parts, text]}], Sampling(max_tokens=6, temperature=0), **fields)


def same(one: Prompt, other: Prompt) -> bool:
    tensors = [(one.ids, other.ids), (one.layout.spans, other.layout.spans)]
    tensors += [(a.columns, b.columns) for a, b in zip(one.layout.images, other.layout.images, strict=True)]
    tensors += [(one.inputs[name], other.inputs[name]) for name in one.inputs.keys() | other.inputs.keys()]
    if one.rope is not None and other.rope is not None:
        tensors.append((one.rope, other.rope))
    assert [image.grid for image in one.layout.images] == [image.grid for image in other.layout.images]
    assert [image.key for image in one.pictures] == [image.key for image in other.pictures]
    assert (one.rope is None) == (other.rope is None)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in tensors)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prompt_is_the_one_that_the_engine_reads(family: str, root: Path) -> None:
    folder = families.checkpoint(family, root)
    whole = steering.load(folder, device="cpu")
    unread = steering.load(folder, device="meta", dtype="float32", unread=whole.fingerprint)
    assert all(one.is_meta for one in unread.model.parameters())
    for images in ([], [picture()], [picture("blue"), picture("white", (56, 112))]):
        if family in families.IMAGE_ONLY and len(images) != 1:
            continue
        request = about(*images)
        read = read_prompt(unread, request, 4096)
        sent = serialization.read(serialization.written(read))
        assert same(sent, read_prompt(whole, request, 4096))


def test_pictures_travel_once(unread: steering.MLLM) -> None:
    prompt = read_prompt(unread, about(picture(), picture("blue")), 4096)
    assert all(one.table is not None for one in prompt.pictures)
    pixels = sum(one.tensors["pixel_values"].nbytes + one.table.values.nbytes for one in prompt.pictures)  # type: ignore[union-attr]
    assert pixels < len(serialization.written(prompt)) < 1.5 * pixels


def test_a_picture_that_is_asked_about_again_is_neither_processed_nor_sent_again(
    apart: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = apart()
    sent: list[int] = []
    real = serialization.parts

    def parts(*given: Any) -> list[bytes]:
        written = real(*given)
        if "add" in given[0]:
            sent.append(sum(map(len, written)))
        return written

    monkeypatch.setattr(serialization, "parts", parts)
    green = about(picture("green"))
    asked = [green, about(picture("blue"), picture("green")), green]
    expected = alone(there).generate(asked)
    counted = there.engine.stats()
    with there.engine.turn() as turn:
        found = [turn.submit(request).result() for request in asked]
    stats = there.engine.stats()
    assert [one.choices[0].token_ids for one in found] == [one.choices[0].token_ids for one in expected]
    pixels = sum(one.nbytes for one in build_prompt(there.own.mllm, green.messages).pictures[0].tensors.values())
    assert sent[0] > pixels
    assert pixels < sent[1] < 1.7 * pixels  # of two
    assert sent[2] < 4200
    assert [stats[name] - counted[name] for name in ("processed_images_hits", "processed_images_misses")] == [2, 2]


def test_the_engine_s_process_reads_no_prompt(apart: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    there, stepping = apart(), threading.get_ident()

    def build(*given: Any) -> Prompt:
        assert threading.get_ident() == stepping, "the engine has read a prompt"
        return build_prompt(*given)

    monkeypatch.setattr(input_processor, "build_prompt", build)
    with there.engine.turn() as turn:
        assert turn.submit(about(picture(), diagnose=Diagnose())).result().choices[0].diagnostics
        with pytest.raises(ContextOverflow):  # which costs the thread that steps nothing
            turn.submit(Request([{"role": "user", "content": "What is it? " * 2000}]))


def test_a_prompt_that_is_too_long_is_refused_as_the_engine_itself_refuses_it(apart: Make) -> None:
    there = apart(max_length=64)
    refused = []
    for submit in (alone(there).submit, there.client.submit):
        with pytest.raises(ContextOverflow) as refusal:
            submit(about(picture(), {"type": "text", "text": "a " * 300}))
        refused.append((str(refusal.value), vars(refusal.value)))
    assert refused[0] == refused[1]
