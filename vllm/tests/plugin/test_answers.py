"""Answers over an engine that is played: pictures leave the event loop free, and a leader does not outlive its twin."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helmsight_vllm import answers
from helmsight_vllm.answers import Answers
from helmsight_vllm.body import AnswerBody
from helmsight_vllm.inputs import Refused
from helmsight_vllm.masks import GRID, maskable
from helmsight_vllm.noise import PIXELS
from PIL import Image

IDS = [5, 6, 7]
HASH = hashlib.sha256(np.array(IDS, "<i4").tobytes()).hexdigest()
PROMPT = {"ids": IDS, "length": 3, "sha256": HASH, "classes": [[0, 3]]}
STEERING, RULE = {"classes": 1, "vectors": []}, {"weight": 1.0}
CAN = ["steer", "pairs", "vcd", "generate"]
ENDS = {"token_ids": [9], "logprobs": None, "finish_reason": "length"}


class Engine:
    """An engine whose twins end with their first token, and whose leaders go on until they are aborted.

    late: the number of aborts that come before it knows the leader.
    """

    def __init__(self, late: int = 0):
        cache = SimpleNamespace(num_gpu_blocks=100, block_size=16)
        scheduler = SimpleNamespace(max_num_seqs=4, watermark=0.0)
        model = SimpleNamespace(
            get_total_num_hidden_layers=lambda: 2,
            get_head_size=lambda: 32,
            hf_config=SimpleNamespace(vision_config=None),
        )
        self.vllm_config = SimpleNamespace(cache_config=cache, scheduler_config=scheduler, model_config=model)
        self.renderer = self
        self.loop: Any = None
        self._late, self._aborted = late, asyncio.Event()

    async def render_cmpl_async(self, prompts: list[Any], skip_mm_cache: bool) -> list[Any]:
        return [{"prompt_token_ids": prompts[0]["prompt_token_ids"]}]

    async def generate(self, inputs: Any, params: Any, number: str) -> AsyncIterator[Any]:
        ends = ENDS
        if "twin" not in number:
            await self._aborted.wait()
            ends = {**ENDS, "token_ids": [], "finish_reason": "abort"}
        yield SimpleNamespace(outputs=[SimpleNamespace(**ends)], num_cached_tokens=0, prompt_logprobs=None)

    async def abort(self, number: str) -> None:
        assert "twin" not in number
        self._late -= 1
        if self._late < 0:
            self._aborted.set()

    async def collective_rpc(self, name: str, args: Any) -> list[Any]:
        return [[[0]]] if name == "helmsight_mask" else [{}]


def body_of(**more: Any) -> AnswerBody:
    return AnswerBody.model_validate({"prompt": PROMPT, "sampling": {"max_tokens": 4}, **more})


def answered(body: AnswerBody, engine: Engine) -> list[Any]:
    """Return the lines of an answer, which must come within seconds."""

    async def answering() -> list[Any]:
        engine.loop = asyncio.get_running_loop()
        served = Answers(engine, CAN, 1)  # type: ignore[arg-type]
        prepared = await served.prepare(body)
        return [json.loads(line) async for line in served.lines(body, prepared)]

    return asyncio.run(asyncio.wait_for(answering(), 20))


@pytest.mark.parametrize("late", [0, 2])
def test_a_leader_that_goes_on_without_its_twin_is_ended(monkeypatch: pytest.MonkeyPatch, late: int) -> None:
    monkeypatch.setattr(answers, "ALONE", 0.05)
    body = body_of(twin={"rule": RULE, "prompt": PROMPT})
    (line,) = answered(body, Engine(late))
    assert "abort" in line["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": {"ids": IDS, "length": 4, "sha256": HASH}}, "prompt.sha256"),
        (
            {"steering": STEERING, "twin": {"rule": RULE, "prompt": {**PROMPT, "classes": [[0, 2]]}}},
            "twin.prompt.classes",
        ),
        (
            {"steering": STEERING, "twin": {"rule": RULE, "prompt": {**PROMPT, "classes": [[1, 3]]}}},
            "twin.prompt.classes",
        ),
        ({"twin": {"rule": RULE, "mask": {"top": 0.5, "images": [], "layers": [0]}}}, "twin.mask"),
    ],
)
def test_what_would_end_the_engine_is_refused(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        answered(body_of(**changes), Engine())
    assert refused.value.param == param


@pytest.mark.parametrize("slow", ["image_of", "add_noise", "add_masks"])
def test_the_event_loop_is_free_while_pictures_are_computed(monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """A slow computation waits here for the event loop, in which other answers are passed on."""
    monkeypatch.setattr(answers, "ALONE", 0.05)
    monkeypatch.setattr(answers, "maskable", lambda inputs, tokens: True)
    engine, found = Engine(), []

    def waiting(*args: Any) -> Image.Image:
        free = threading.Event()
        engine.loop.call_soon_threadsafe(free.set)
        found.append(free.wait(2))
        return Image.new("RGB", (2, 2))

    for name in ("image_of", "add_noise", "add_masks"):
        monkeypatch.setattr(answers, name, waiting if name == slow else lambda *args: None)
    mask, noise = {"top": 0.5, "images": [[0]], "layers": [0]}, {"step": 1, "seeds": [1]}
    other: dict[str, Any] = {"mask": mask} if slow == "add_masks" else {"noise": noise}
    answered(body_of(images=["a picture"], twin={"rule": RULE, **other}), engine)
    assert found
    assert all(found)


def test_pictures_are_masked_only_where_pixel_values_are_a_row_for_each_patch() -> None:
    """PaddleOCR-VL has its patches as (patches, channels, height, width), which a mask would take for other pixels."""
    for shape, right in (((16, 588), True), ((16, 3, 14, 14), False), ((15, 588), False)):
        item = {GRID: None, PIXELS: SimpleNamespace(data=torch.zeros(shape))}
        assert maskable({"mm_kwargs": {"image": [item]}}, [4]) == right
