"""Tools: what the model reads of them, and what it calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema import Draft202012Validator

import steering
from steering import Engine, Grammar, Icd, Request, RequestError, Sampling, ToolCall, Tools
from steering.prompt.layout import build_prompt
from steering.prompt.rendering import TemplateOptions
from steering.prompt.spans import OTHER
from steering.tools.formats import format_of
from tests import families
from tests.families.calling import FAMILY, calling
from tests.steering.conftest import MakeEngine

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"enum": ["top", "bottom"]}, "closely": {"type": "boolean"}},
    "required": ["at"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": LOOK}},
    {"type": "function", "function": {"name": "count"}},
]
QUESTION = families.example_messages(FAMILY, 2, text="How many balls?", system="Be brief.")
CALLED: list[dict[str, Any]] = [
    *QUESTION,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "top"}'}}],
    },
    {"role": "tool", "content": "A ball.", "tool_call_id": "1"},
]


@pytest.fixture(scope="module")
def engine(root: Path) -> Engine:
    return Engine(steering.load(calling(root), device="cpu"), slots=6, max_length=1024, self_check=False)


def test_the_model_reads_what_its_template_tells_of_tools_and_calls(engine: Engine) -> None:
    mllm = engine.mllm
    request = Request(CALLED, tools=Tools(FUNCTIONS))
    prompt = build_prompt(mllm, request.chat, options=TemplateOptions(FUNCTIONS))
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "top"}}}
    parts = [{"type": "text", "text": "A ball."}]
    plain = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": parts}]
    text = mllm.processor.apply_chat_template(plain, tools=FUNCTIONS, tokenize=False, add_generation_prompt=True)
    assert '"name": "count"' in text
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"at": "top"}}\n</tool_call>' in text
    inputs = mllm.processor(text=[text], images=[families.images_of(QUESTION)], return_tensors="pt")
    assert torch.equal(prompt.ids, inputs["input_ids"][0])


def test_spans_are_where_they_are_without_tools(engine: Engine) -> None:
    bare = build_prompt(engine.mllm, QUESTION)
    with_tools = build_prompt(engine.mllm, QUESTION, options=TemplateOptions(FUNCTIONS))
    with_calls = build_prompt(engine.mllm, Request(CALLED).chat, options=TemplateOptions(FUNCTIONS))
    for span in set(bare.layout.spans.tolist()) - {OTHER}:
        expected = bare.ids[bare.layout.columns(span)]
        assert torch.equal(with_tools.ids[with_tools.layout.columns(span)], expected)
        assert torch.equal(with_calls.ids[with_calls.layout.columns(span)], expected)
    assert with_tools.layout.count(OTHER) > bare.layout.count(OTHER)
    tools = engine.mllm.tokenizer.decode(with_tools.ids[: int(with_tools.layout.image_columns[0])])
    assert "<tools>" in tools


def test_special_tokens_in_tools_and_calls_stay_text(engine: Engine) -> None:
    ends = engine.mllm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    bad = "x<|im_end|>\ue0000\ue001<|image_pad|>"
    chat = json.loads(json.dumps(CALLED[len(QUESTION) :]).replace("top", bad.replace("\\", "")))
    functions = [{"type": "function", "function": {"name": "look", "description": bad, "parameters": {"title": bad}}}]
    with_tools = build_prompt(engine.mllm, Request([*QUESTION, *chat]).chat, options=TemplateOptions(functions))
    plain = build_prompt(engine.mllm, Request(CALLED).chat, options=TemplateOptions(FUNCTIONS))
    assert (with_tools.ids == ends).sum() == (plain.ids == ends).sum()
    assert "x<|im_end|>0<|image_pad|>" in engine.mllm.tokenizer.decode(with_tools.ids)


@pytest.mark.parametrize("more", [{}, {"interventions": Icd()}, {"n": 2, "baseline": True}])
def test_a_required_call_is_one_that_its_parameters_allow(engine: Engine, more: dict[str, Any]) -> None:
    sampling = Sampling(max_tokens=120, temperature=1.5, seed=3)
    request = Request(CALLED, sampling, tools=Tools(FUNCTIONS, "look", parallel=False), **more)
    result = engine.generate([request])[0]
    for choice in [
        *result.choices,
        *(baseline.baseline for baseline in result.choices if baseline.baseline is not None),
    ]:
        assert (choice.text, choice.finish_reason) == ("", "tool_calls")
        (call,) = choice.tool_calls
        assert call.name == "look"
        Draft202012Validator(LOOK).validate(json.loads(call.arguments))


def test_several_calls_may_be_required_and_a_stream_adds_up(engine: Engine) -> None:
    request = Request(QUESTION, Sampling(max_tokens=250, temperature=1.0, seed=1), tools=Tools(FUNCTIONS, True))
    completion = engine.submit(request)
    while not completion.done:
        engine.step()
    chunks = list(completion)
    final, pieces = chunks[-1].choice, [piece for chunk in chunks for piece in chunk.calls]
    assert final is not None
    assert len(final.tool_calls) > 1
    for number, call in enumerate(final.tool_calls):
        pieces_of_call = [piece for piece in pieces if piece.number == number]
        assert ToolCall(pieces_of_call[0].name or "", "".join(piece.arguments for piece in pieces_of_call)) == call
        assert [piece.name for piece in pieces_of_call[1:]] == [None] * (len(pieces_of_call) - 1)


def test_a_call_that_the_model_chose_is_found(engine: Engine) -> None:
    text = 'I count.\n<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>'
    choice = engine.generate([Request(QUESTION, forced=text, tools=Tools(FUNCTIONS))])[0].choices[0]
    assert (choice.text, choice.tool_calls, choice.finish_reason) == (
        "I count.",
        (ToolCall("count", "{}"),),
        "tool_calls",
    )
    free = engine.generate([Request(QUESTION, forced=text)])[0].choices[0]
    assert (free.text, free.tool_calls, free.finish_reason) == (text, (), "stop")


def test_a_template_without_tools_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY)
    assert format_of(engine.mllm) is None
    for request, param in ((Request(QUESTION, tools=Tools(FUNCTIONS)), "tools"), (Request(CALLED), "messages")):
        with pytest.raises(RequestError, match="knows no tools") as caught:
            engine.submit(request)
        assert caught.value.param == param


WRONG: list[tuple[Any, str]] = [
    ([], "tools"),
    ([1], "tools[0]"),
    ([{"function": {"name": "a b"}}], "tools[0].function.name"),
    ([{"function": {"name": "a", "parameters": 1}}], "tools[0].function.parameters"),
    ([{"function": {"name": "a", "parameters": {"type": "array"}}}], "tools[0].function.parameters"),
    ([{"function": {"name": "a", "description": {1}}}], "tools[0]"),
    ([FUNCTIONS[0], FUNCTIONS[0]], "tools"),
]


@pytest.mark.parametrize(("functions", "param"), WRONG)
def test_wrong_tools_are_named(functions: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        Tools(functions)
    assert caught.value.param == param


def test_options_that_exclude_each_other_are_named(engine: Engine) -> None:
    with pytest.raises(RequestError, match="'tool_choice' must name one of the tools"):
        Tools(FUNCTIONS, "fly")
    with pytest.raises(RequestError, match="'tool_choice' and 'force'"):
        Request(QUESTION, forced="a", tools=Tools(FUNCTIONS, True))
    with pytest.raises(RequestError, match="'grammar' and a required call"):
        Request(QUESTION, grammar=Grammar.json_object(), tools=Tools(FUNCTIONS, True))
    unsupported = {"name": "f", "parameters": {"propertyNames": {"maxLength": 3}}, "strict": True}
    with pytest.raises(
        RequestError, match=r"^'tools' cannot be enforced: Unimplemented keys: \[\"propertyNames\"\]\.$"
    ):
        engine.submit(Request(QUESTION, tools=Tools([{"function": unsupported}], True)))


def test_wrong_calls_in_a_chat_are_named() -> None:
    place = f"messages[{len(QUESTION)}].tool_calls"
    for calls, param in (
        (1, place),
        ([1], f"{place}[0].function"),
        *(
            ([{"function": {"name": "a", "arguments": arguments}}], f"{place}[0].function.arguments")
            for arguments in ("[1]", '{"at": "\\ud800"}', '{"a":' * 500 + "1" + "}" * 500)
        ),
    ):
        with pytest.raises(RequestError) as caught:
            Request([*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}])
        assert caught.value.param == param
