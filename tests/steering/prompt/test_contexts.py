"""Text contexts in messages of every role: their tokens, and the chats without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import steering
from steering import MLLM
from steering.prompt.chat import contexts_of, without_context
from steering.prompt.layout import build_prompt
from steering.prompt.spans import CONTEXT, OTHER, QUESTION, SYSTEM
from tests.families.calling import calling
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM
from tests.steering.plain import Messages
from tests.steering.prompt.reading import EVERY, said, squeezed, user

CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
LINE, MARKED = "Text context: the shop is closed.", text("The sign says open.", span="context")


def turn(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def looked(*parts: dict[str, Any], answer: str = "I look.") -> Messages:
    """Return a chat in which a tool's result has these parts."""
    return [
        *user(image(0), text("Is it open?")),
        {**turn("assistant", text(answer)), "tool_calls": [CALL]},
        {**turn("tool", *parts), "tool_call_id": "1"},
    ]


@pytest.fixture(scope="module")
def tooled(root: Path) -> MLLM:
    """Return a model whose chat template shows results of tools."""
    return steering.load(calling(root), device="cpu")


@pytest.mark.parametrize("family", EVERY)
def test_a_line_of_a_system_message(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    content = f"Be polite.\n{LINE}\nBe brief."
    for chat in ([turn("system", text(content))], [{"role": "system", "content": content}]):
        prompt = build_prompt(mllm, [*chat, *user(image(0), text("Is it open?"))])
        assert said(mllm, prompt, CONTEXT) == LINE
        assert squeezed(said(mllm, prompt, SYSTEM)) == "Bepolite.Bebrief."
        assert said(mllm, prompt, QUESTION) == "Is it open?"
        system, users = (part.nonzero()[:, 0].tolist() for part in prompt.layout.texts.unbind(1))
        assert system == sorted(prompt.layout.columns(SYSTEM).tolist() + prompt.layout.columns(CONTEXT).tolist())
        assert users == prompt.layout.columns(QUESTION).tolist()


@pytest.mark.parametrize("family", EVERY)
def test_a_marked_part_of_a_system_message(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    prompt = build_prompt(mllm, [turn("system", MARKED), *user(image(0), text("Is it open?"))])
    assert said(mllm, prompt, CONTEXT) == MARKED["text"]
    assert prompt.layout.count(SYSTEM) == 0


def test_a_marked_part_after_another(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    prompt = build_prompt(mllm, [turn("system", text("Be brief."), MARKED), *user(image(0), text("Is it open?"))])
    assert said(mllm, prompt, CONTEXT) == MARKED["text"]
    assert said(mllm, prompt, SYSTEM) == "Be brief."


def test_a_part_and_a_line_of_a_tools_result(tooled: MLLM) -> None:
    prompt = build_prompt(tooled, looked(text(f"Found 2 signs.\n{LINE}\nEnd."), MARKED))
    assert squeezed(said(tooled, prompt, CONTEXT)) == squeezed(LINE + str(MARKED["text"]))
    left = said(tooled, prompt, OTHER)
    assert "Found 2 signs." in left
    assert "shop" not in left
    assert "sign says" not in left
    assert not prompt.layout.texts[prompt.layout.columns(CONTEXT)].any()  # neither system nor user
    as_text = [*looked()[:2], {"role": "tool", "tool_call_id": "1", "content": LINE}]
    assert said(tooled, build_prompt(tooled, as_text), CONTEXT) == LINE


def test_an_assistants_words_are_a_context_only_where_they_are_marked(tooled: MLLM) -> None:
    prompt = build_prompt(tooled, looked(text("A sign."), answer=LINE))
    assert prompt.layout.count(CONTEXT) == 0
    assert LINE in said(tooled, prompt, OTHER)
    chat = [*user(image(0), text("What is it?")), turn("assistant", MARKED), *user(text("Is it open?"))]
    assert said(tooled, build_prompt(tooled, chat), CONTEXT) == MARKED["text"]


def test_without_an_image_the_system_part_ends_where_the_users_text_begins(load_mllm: LoadMLLM) -> None:
    """A context in the system message is no text of the user's."""
    mllm = load_mllm("qwen2_vl")
    prompt = build_prompt(mllm, [turn("system", text("Be brief."), MARKED), *user(text("Is it open?"))])
    before, after = (half.nonzero()[:, 0].tolist() for half in prompt.layout.halves.unbind(1))
    assert after[0] == int(prompt.layout.columns(QUESTION)[0])
    assert before == list(range(after[0]))


def test_chats_without_their_contexts_by_hand() -> None:
    called = {**turn("assistant", text("I look.")), "tool_calls": [CALL]}
    chat = [
        {"role": "system", "content": f"Be brief.\n{LINE}\n"},
        turn("system", MARKED),
        *user(image(0), text(f"{LINE}\nIs it open?")),
        called,
        {"role": "tool", "content": [MARKED]},
        {"role": "tool", "content": [text("End."), text(LINE)]},
        {"role": "assistant", "content": LINE},
        *user(text("Sure?")),
    ]
    assert without_context(chat) == [
        {"role": "system", "content": "Be brief.\n"},
        *user(image(0), text("Is it open?")),
        called,
        {"role": "tool", "content": ""},
        {"role": "tool", "content": [text("End."), text("")]},
        {"role": "assistant", "content": LINE},
        *user(text("Sure?")),
    ]
    closed, sign = "the shop is closed.", MARKED["text"]
    assert contexts_of(chat) == [closed, sign, closed, sign, closed]
    assert without_context([{"role": "system", "content": ""}]) == [{"role": "system", "content": ""}]
