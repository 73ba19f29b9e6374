"""Pictures in results of tools and in turns of the assistant, where the chat template accepts them.

They are placed, spanned and read as those of users.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import Engine, Request, RequestError, Sampling, Steer
from steering.prompt.layout import build_prompt
from steering.prompt.spans import FIRST_IMAGE, OTHER, QUESTION
from tests import families
from tests.families.calling import calling
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM
from tests.steering.interventions.pushes import make_vector
from tests.steering.prompt.reading import EVERY, said, user

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
ASKED = [
    *user(image(0), text("Which button is green?")),
    {"role": "assistant", "content": [text("I look.")], "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": [text("The screen:"), image(1)]},
]
SHOWN = [
    *user(text("Draw a ball.")),
    {"role": "assistant", "content": [image(2), text("Here it is.")]},
    *user(text("Is it red?")),
]
AGAIN = [*ASKED, {"role": "assistant", "content": [text("The left one."), image(3)]}, *user(text("Are you sure?"))]


@pytest.fixture(scope="module")
def engine(root: Path) -> Engine:
    return Engine(steering.load(calling(root), device="cpu"), slots=4, max_length=1024, self_check=False)


@pytest.mark.parametrize("chat", [ASKED, SHOWN, AGAIN])
def test_ids_and_spans(engine: Engine, chat: list[dict[str, Any]]) -> None:
    mllm = engine.mllm
    prompt = build_prompt(mllm, chat)
    whole = mllm.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = mllm.processor(text=[whole], images=[families.images_of(chat)], return_tensors="pt")
    assert torch.equal(prompt.ids, inputs["input_ids"][0])
    assert torch.equal(prompt.inputs["pixel_values"], inputs["pixel_values"])
    pictures, columns = len(families.images_of(chat)), (prompt.ids == mllm.image_token_id).nonzero()[:, 0]
    sizes = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]  # two by two patches are a token
    for number, own in enumerate(columns.split(sizes)):
        assert torch.equal(prompt.layout.columns(FIRST_IMAGE + number), own)
        assert torch.equal(prompt.layout.images[number].columns, own)
    assert len(prompt.layout.images) == pictures
    last = [message for message in chat if message["role"] == "user"][-1]["content"][-1]["text"]
    assert said(mllm, prompt, QUESTION).strip() == last
    assert said(mllm, prompt, OTHER).count("The screen:") == (chat is not SHOWN)


def test_a_question_before_a_picture_has_no_rows_that_see_it(engine: Engine) -> None:
    """The rows of the answer are read then, as with a user's question before a picture."""
    assert len(build_prompt(engine.mllm, ASKED).layout.question_rows) == 0
    assert len(build_prompt(engine.mllm, AGAIN).layout.question_rows) > 0
    diagnose = {"diagnose": ["focus", "modality", "patches"], "sampling": Sampling(max_tokens=4, ignore_eos=True)}
    chats = [ASKED, AGAIN, SHOWN]
    for chat, result in zip(chats, engine.generate([Request(one, **diagnose) for one in chats]), strict=True):
        found = result.choices[0].diagnostics
        assert found is not None
        layout = build_prompt(engine.mllm, chat).layout
        assert [one["tokens"] for one in found["images"]] == [one.tokens for one in layout.images]
        assert found["rows"]["question"] == len(layout.question_rows)
        assert len(found["focus"]["sigma"][0]) == len(layout.images)


def test_a_vector_for_picture_2_is_added_to_the_tools(engine: Engine) -> None:
    vector, picture = make_vector(engine.mllm), build_prompt(engine.mllm, ASKED).layout.images[1]
    steers = [Steer(vector, 1.0, tokens=tokens) for tokens in ("image:2", "image")]
    sampling = Sampling(max_tokens=2, ignore_eos=True)
    both = engine.generate([Request(ASKED, sampling, one) for one in steers])
    own, all_of_them = (result.choices[0].applied["steering"][0]["tokens"] for result in both)  # type: ignore[index]
    assert own == picture.tokens
    assert all_of_them == int((build_prompt(engine.mllm, ASKED).ids == engine.mllm.image_token_id).sum())


@pytest.mark.parametrize("family", EVERY)
def test_a_family_places_a_picture_of_the_assistant_or_says_that_it_does_not(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = [
        *user(image(0), text("Draw a ball.")), {"role": "assistant", "content": [text("Here."), image(2)]},
        *user(text("Is it red?")),
    ]  # fmt: skip
    whole = mllm.processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    users = mllm.processor.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    mark = next(iter(re.findall(r"<[^>]*(?:image|img|IMG)[^>]*>|\[IMG\]", users)))
    if whole.count(mark) > users.count(mark):
        assert len(build_prompt(mllm, chat).layout.images) == 2
        return
    with pytest.raises(RequestError, match=r"It may take no images in messages of the role assistant\."):
        build_prompt(mllm, chat)


def test_a_template_that_writes_parts_out_gets_texts_and_no_pictures(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = engine.mllm.chat
    begin, end = "{{- '\\n<tool_response>\\n' }}\n", "{{- '\\n</tool_response>' }}"
    before, rest = engine.mllm.template.split(begin)
    writing = before + begin + "{{- message.content }}" + end + rest.partition(end)[2]
    monkeypatch.setattr(engine.mllm.processor, "chat_template", writing)
    monkeypatch.setattr(engine.mllm, "chat", type(chat)(engine.mllm.processor))
    with pytest.raises(RequestError, match="It may take no images in messages of the role tool"):
        build_prompt(engine.mllm, ASKED)
    texts = [*ASKED[:2], {"role": "tool", "tool_call_id": "1", "content": [text("A ball.")]}]
    decoded = engine.mllm.tokenizer.decode(build_prompt(engine.mllm, texts).ids)
    assert "<tool_response>\nA ball.\n</tool_response>" in decoded
