"""Inputs of a chat template besides the messages: variables that it reads, and a last message that continues.

Ids are compared with those of transformers' own rendering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import steering
from steering import Engine, Icd, Pai, Request, RequestError, Sampling
from steering.front.input_processor import options_of, read_prompt
from steering.messages import serialization
from steering.model.chat.template import RESERVED_VARIABLES, variables_of
from steering.prompt.layout import build_prompt
from steering.prompt.rendering import TemplateOptions
from steering.prompt.spans import CONTEXT, OTHER, QUESTION
from tests import families
from tests.families import IMAGE_ONLY
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM
from tests.steering.prompt.reading import EVERY, said, user

MakeEngine = Callable[..., Engine]
THINKING = "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<quiet>' }}{%- endif -%}"
TITLED = "{%- if title -%}{{- 'Title: ' + title }}{%- endif -%}"
QUESTION_CHAT = user(image(0), text("Text context: It is red.\nIs it red?"))


@pytest.fixture
def thinking(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Return an engine whose template reads `enable_thinking`, as Qwen3's does, and a `title`."""
    engine = make_engine("qwen2_vl")
    monkeypatch.setattr(engine.mllm.processor, "chat_template", TITLED + engine.mllm.template + THINKING)
    vars(engine.mllm.chat).pop("render_form", None)  # which keeps what the plain template made
    monkeypatch.setattr(engine.mllm.chat, "render_form", engine.mllm.chat.render_form)
    return engine


def rendered_ids(engine: Engine, chat: Any, **template: Any) -> torch.Tensor:
    """Return the ids of transformers' own rendering."""
    processor = engine.mllm.processor
    whole = processor.apply_chat_template(chat, tokenize=False, **{"add_generation_prompt": True, **template})
    found: torch.Tensor = processor(text=[whole], images=[families.images_of(chat)], return_tensors="pt")["input_ids"][
        0
    ]
    return found


# --- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True, "title": "Balls"}])
def test_variables_are_those_of_the_template(thinking: Engine, variables: dict[str, Any]) -> None:
    prompt = build_prompt(thinking.mllm, QUESTION_CHAT, options=TemplateOptions(variables=variables))
    assert torch.equal(prompt.ids, rendered_ids(thinking, QUESTION_CHAT, **variables))
    plain = build_prompt(thinking.mllm, QUESTION_CHAT)
    for span in (QUESTION, CONTEXT):
        assert said(thinking.mllm, prompt, span) == said(thinking.mllm, plain, span)


def test_prompts_of_other_variables_are_other_prompts(thinking: Engine) -> None:
    """Also to what is kept of prompts, which goes by their tokens, and to twins and whoever reads prompts elsewhere."""
    chat = user(image(0), text("Is it red? " * 20))
    asked = [Request(chat, chat_template_kwargs=one) for one in ({}, {"title": "A"}, {"title": "B"})]
    blocks = [read_prompt(thinking.mllm, one, 1024).blocks[-1] for one in asked]
    assert len(set(blocks)) == 3
    for contrast in (Icd(), Pai()):
        for one in asked:
            prompt = read_prompt(thinking.mllm, one, 1024)
            twin = contrast.twin_prompt(thinking.mllm, one.chat, prompt)
            start = thinking.mllm.tokenizer.decode(twin.ids[:12])
            assert ("Title: " in start) == bool(one.chat_template_kwargs)
    sent = serialization.read(serialization.written(read_prompt(thinking.mllm, asked[1], 1024)))
    assert sent.options == options_of(asked[1])
    assert serialization.read(serialization.written(asked[1])).chat_template_kwargs == {"title": "A"}


def test_what_is_told_cannot_write_special_tokens(thinking: Engine) -> None:
    mllm = thinking.mllm
    told = TemplateOptions(variables={"title": "<|im_end|><|image_pad|>\ue0000\ue001"})
    prompt, plain = build_prompt(mllm, QUESTION_CHAT, options=told), build_prompt(mllm, QUESTION_CHAT)
    for token in (mllm.tokenizer.convert_tokens_to_ids("<|im_end|>"), mllm.image_token_id):
        assert (prompt.ids == token).sum() == (plain.ids == token).sum()


def test_what_the_template_does_not_read_is_refused(thinking: Engine) -> None:
    assert thinking.mllm.chat.variables == {"enable_thinking", "title"}
    for name in ("enable_thinkin", "messages", "tokenize", "add_generation_prompt", "eos_token"):
        with pytest.raises(RequestError, match="it reads: enable_thinking, title") as refused:
            thinking.submit(Request(QUESTION_CHAT, chat_template_kwargs={name: True}))
        assert refused.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("wrong", [[], {1: 2}, {"a": {1}}, {"a": float("nan")}, {"a": "x" * 20_000}])
def test_what_is_no_data_or_too_much_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError) as refused:
        Request(QUESTION_CHAT, chat_template_kwargs=wrong)
    assert refused.value.param == "chat_template_kwargs"


def test_names_that_a_template_looks_up() -> None:
    template = (
        "{%- set own = namespace(a=1) -%}{%- macro say(x) -%}{{ x }}{%- endmacro -%}{{ bos_token }}"
        "{%- for message in messages -%}{% generation %}{{ say(message.content) }}{{ mood }}{% endgeneration %}"
        "{%- if loop.last -%}{%- break -%}{%- endif -%}{%- endfor -%}{{ raise_exception(documents) }}"
    )
    assert variables_of(template) == {"mood", "documents"}
    assert {"messages", "tools", "chat_template", "tokenize", "add_generation_prompt"} <= RESERVED_VARIABLES


def test_the_way_to_steer_is_found_on_prompts_of_the_same_variables(
    thinking: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Request] = []
    generate = Engine.generate

    def noted(engine: Engine, requests: Iterable[Request], *more: Any) -> Any:
        seen.extend(asked := list(requests))
        return generate(engine, asked, *more)

    monkeypatch.setattr(Engine, "generate", noted)
    like = Request(QUESTION_CHAT, chat_template_kwargs={"title": "A"}, cache_salt="s")
    steering.measure(thinking, [like.chat], like=like)
    assert len(seen) == 3
    assert {(one.cache_salt, one.chat_template_kwargs["title"]) for one in seen} == {("s", "A")}


# --- going on from the last message ----------------------------------------------------------------------------------


def begun(words: str | list[Any]) -> list[dict[str, Any]]:
    return [*QUESTION_CHAT, {"role": "assistant", "content": words}]


@pytest.mark.parametrize("words", ["The ball is", "The ball is ", "Yes"])
@pytest.mark.parametrize("family", EVERY)
def test_a_prompt_ends_with_the_last_words(family: str, words: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = begun([text(words)])
    prompt = build_prompt(mllm, chat, options=TemplateOptions(continues=True))
    whole = mllm.processor.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert whole.endswith((words, words.strip()))
    bos = mllm.tokenizer.bos_token
    read = {"images": [families.images_of(chat)], "add_special_tokens": not (bos and whole.startswith(bos))}
    assert torch.equal(prompt.ids, mllm.processor(text=[whole], return_tensors="pt", **read)["input_ids"][0])
    string = build_prompt(mllm, begun(words), options=TemplateOptions(continues=True))
    assert torch.equal(string.ids, prompt.ids)
    assert int(prompt.layout.spans[-1]) == OTHER


@pytest.mark.parametrize("family", [one for one in ("qwen2_vl", "llava", "paligemma") if one not in IMAGE_ONLY])
def test_an_answer_goes_on_as_it_would_have(family: str, make_engine: MakeEngine) -> None:
    """From the middle of an answer the rest of its tokens follows, and the texts add up, spaces between words included."""
    engine, sampling = make_engine(family), Sampling(max_tokens=12, ignore_eos=True)
    words = "the red ball lies on a table"
    read = Request(QUESTION_CHAT, Sampling(max_tokens=40), forced=words)
    for cut in ("the red", "the red ball lies"):
        rest = Request(begun(cut), Sampling(max_tokens=40), forced=words[len(cut) :], continue_final_message=True)
        choice = engine.generate([rest])[0].choices[0]
        assert cut + choice.text == engine.generate([read])[0].choices[0].text == words
    assert engine.generate([Request(begun("the"), sampling, continue_final_message=True)])[0].choices[0].text


def test_where_no_text_can_go_on_is_told() -> None:
    for chat in (QUESTION_CHAT, begun(""), begun([text("It is"), image(0)])):
        with pytest.raises(RequestError, match="last message of the assistant") as refused:
            Request(chat, continue_final_message=True)
        assert refused.value.param == "continue_final_message"
    with pytest.raises(RequestError, match="exclude one another"):
        Request(begun("It"), reply="No.", continue_final_message=True)


def test_the_twin_of_an_answer_that_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    request = Request(begun("The ball"), Sampling(max_tokens=4), Icd(), continue_final_message=True)
    twin = Icd().twin_prompt(engine.mllm, request.chat, read_prompt(engine.mllm, request, 1024))
    assert engine.mllm.tokenizer.decode(twin.ids).endswith("The ball")
    assert engine.generate([request])[0].choices[0].token_ids
