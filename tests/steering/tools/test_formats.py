"""The formats of Mistral and GLM: what models of theirs read, what they are made to write, and what is found in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import steering
from steering import Engine, Grammar, Request, RequestError, Sampling, ToolCall, Tools
from steering.grammar.compiled import Grammars
from steering.prompt.layout import build_prompt
from steering.prompt.rendering import TemplateOptions
from steering.tools.calls import CallStream
from steering.tools.formats import FORMATS, format_of, special_tags, with_short_ids
from tests.families.calling import KINDS, calling
from tests.steering.tools.test_tools import CALLED, FUNCTIONS, LOOK, QUESTION

NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 9},
        "kind": {"enum": ["a", "b"]},
        "many": {"type": "array", "items": {"enum": [1, 23]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["kind", "many"],
}
TOOLS = [*FUNCTIONS, {"type": "function", "function": {"name": "note", "parameters": NOTE}}]
SAID = {
    "glm": "\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>top</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "top"}, "id": "',
    "ministral": '[TOOL_CALLS]look[ARGS]{"at": "top"}',
}
"""The rendering of a call in a chat by each template."""


@pytest.fixture(scope="module", params=list(SAID))
def engine(root: Path, request: pytest.FixtureRequest) -> Engine:
    return Engine(steering.load(calling(root, request.param), device="cpu"), slots=6, max_length=1024, self_check=False)


def kind(engine: Engine) -> str:
    form = format_of(engine.mllm)
    assert form is not None
    return form.name


def test_each_template_is_recognised_by_its_own_text(engine: Engine) -> None:
    assert f"calling-{kind(engine)}" == engine.mllm.path.name  # type: ignore[union-attr]
    form = next(candidate for candidate in FORMATS if candidate.name == kind(engine))
    specials = [tag for tag in KINDS[form.name][2] if tag != "[AVAILABLE_TOOLS]"]
    assert sorted(special_tags(engine.mllm, form)) == sorted(set(specials))


def test_calls_in_a_chat_are_read_as_the_template_writes_them(engine: Engine) -> None:
    chat = Request(CALLED).messages
    chat = with_short_ids(chat) if "mistral" in kind(engine) or "ministral" in kind(engine) else chat
    prompt = build_prompt(engine.mllm, chat, options=TemplateOptions(FUNCTIONS))
    assert SAID[kind(engine)] in engine.mllm.tokenizer.decode(prompt.ids)
    assert engine.generate([Request(CALLED, Sampling(max_tokens=1), tools=Tools(FUNCTIONS))])[0].prompt_tokens > 0


def test_required_calls_are_what_parameters_allow_and_streams_add_up(engine: Engine) -> None:
    schemas = {"look": LOOK, "note": NOTE | {"additionalProperties": False}, "count": {"additionalProperties": False}}
    ended: list[ToolCall] = []
    completions = [
        engine.submit(
            Request(
                QUESTION,
                Sampling(max_tokens=160, temperature=1.0, seed=seed),
                tools=Tools(TOOLS, required, seed % 2 == 0),
            )
        )
        for seed, required in enumerate(("look", "note", True, "note", "note", "look"))
    ]
    while not all(completion.done for completion in completions):
        engine.step()
    for completion in completions:
        chunks = list(completion)
        choice = chunks[-1].choice
        assert choice is not None
        pieces = [piece for chunk in chunks for piece in chunk.calls]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        for number, call in enumerate(choice.tool_calls):
            pieces_of_call = [piece for piece in pieces if piece.number == number]
            assert ToolCall(pieces_of_call[0].name or "", "".join(piece.arguments for piece in pieces_of_call)) == call
        if choice.finish_reason == "tool_calls":
            assert choice.text == ""
            ended += choice.tool_calls
    assert {"look", "note"} <= {call.name for call in ended}
    assert len(ended) > 2
    for call in ended:
        arguments = json.loads(call.arguments)
        if kind(engine) == "glm":  # a text in tags is as long as it likes
            arguments.pop("text", None)
        Draft202012Validator(schemas[call.name]).validate(arguments)


@pytest.mark.parametrize(
    ("grammar", "follows"),
    [
        (Grammar.json_schema(LOOK), lambda text: Draft202012Validator(LOOK).is_valid(json.loads(text))),
        (Grammar.regex("ab{2,5}"), re.compile("ab{2,5}").fullmatch),
        (Grammar.choice(["a ball", "two"]), {"a ball", "two"}.__contains__),
    ],
    ids=["schema", "regex", "choice"],
)
def test_an_answer_calls_tools_or_follows_its_grammar(engine: Engine, grammar: Grammar, follows: Any) -> None:
    form = next(candidate for candidate in FORMATS if candidate.name == kind(engine))
    begins, *_ = engine.mllm.tokenizer(form.start, add_special_tokens=False).input_ids
    for bias in (100.0, -100.0):
        sampling = Sampling(max_tokens=160, temperature=1.0, seed=1, logit_bias={begins: bias})
        request = Request(QUESTION, sampling, grammar=grammar, tools=Tools(FUNCTIONS, parallel=False))
        (choice,) = engine.generate([request])[0].choices
        if bias > 0:
            assert (choice.finish_reason, choice.text, len(choice.tool_calls)) == ("tool_calls", "", 1)
        else:
            assert (choice.finish_reason, choice.tool_calls) == ("stop", ())
            assert follows(choice.text)


@pytest.mark.parametrize("text", ["", "a star", "a < b </", "x</arg", "\u00e9\n\n"])
def test_a_text_within_a_call_ends(engine: Engine, text: str) -> None:
    """A call as the model's own tokenizer splits it follows the grammar of required calls, from token to token."""
    form = next(candidate for candidate in FORMATS if candidate.name == kind(engine))
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a"],
    }
    written = json.dumps({"a": text, "b": 3}, ensure_ascii=False)
    said = {
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        "mistral": f'[TOOL_CALLS] [{{"name": "f", "arguments": {written}}}]',
        "ministral": f"[TOOL_CALLS]f[ARGS]{written}",
    }[form.name]
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], True)
    matcher = Grammars(engine.mllm).start(form.grammar(tools, special_tags(engine.mllm, form)))
    for token in engine.mllm.tokenizer(said, add_special_tokens=False).input_ids:
        matcher.advance(token)
    assert matcher.inner.is_accepting()
    stream = CallStream(form, tools.names, tools.texts, required=True)
    stream.feed(said, last=True)
    assert [json.loads(call.arguments) for call in stream.calls] == [{"a": text, "b": 3}]


def test_special_tokens_become_text_only_in_calls(engine: Engine) -> None:
    """The model writes them as tokens; without tools they are left out, as ever."""
    form = next(candidate for candidate in FORMATS if candidate.name == kind(engine))
    tags = special_tags(engine.mllm, form)
    encode = engine.mllm.tokenizer.backend_tokenizer.encode
    forced = tuple(encode("Hm. " + SAID["ministral"], add_special_tokens=False).ids)
    if form.name != "ministral":
        assert set(tags) <= {"[TOOL_CALLS]"}
        return
    assert set(tags.values()) & set(forced) == {tags["[TOOL_CALLS]"], tags["[ARGS]"]}
    sampling = Sampling(max_tokens=len(forced))
    with_tools = engine.generate([Request(QUESTION, sampling, forced=forced, tools=Tools(FUNCTIONS))])[0].choices[0]
    assert (with_tools.text, with_tools.tool_calls) == ("Hm.", (ToolCall("look", '{"at": "top"}'),))
    free = engine.generate([Request(QUESTION, sampling, forced=forced)])[0].choices[0]
    assert free.text == 'Hm. look{"at": "top"}'


def test_schemas_that_tags_cannot_enforce_are_refused_if_strict(engine: Engine) -> None:
    if kind(engine) != "glm":
        return
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "string", "pattern": "x"}}}, "strict": True}
    with pytest.raises(RequestError, match=r"'tools' cannot be enforced: pattern of 'a'"):
        engine.submit(Request(QUESTION, tools=Tools([{"function": function}], True)))
    whole: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "required": ["b"]}}}
    with pytest.raises(RequestError, match=r"'tools' cannot be enforced: \$ref of parameters"):
        engine.submit(Request(QUESTION, tools=Tools([{"function": function | {"parameters": whole}}], True)))
    for wrong in ({"properties": [1]}, {"required": 5}, {"required": [{}]}):
        with pytest.raises(RequestError, match="parameters need"):
            engine.submit(Request(QUESTION, tools=Tools([{"function": {"name": "f", "parameters": wrong}}], True)))


UNWRITABLE: list[tuple[dict[str, Any], str]] = [
    ({"properties": {" a": {}}}, "properties"),
    ({"properties": {"b": {}, "a\n": {"type": "string"}}}, "properties"),
    ({"properties": {"a</arg_key>b": {}}}, "properties"),
    ({"properties": {"a</tool_call>": {}}}, "properties"),
    ({"required": ["a "]}, "required"),
    ({"properties": {"a": {"enum": ["b", "c</arg_value>"]}}}, "properties.a.enum"),
    ({"properties": {"a": {"type": "string", "const": "</arg_value>"}}}, "properties.a.const"),
    ({"properties": {"a": {"enum": [1, "</arg_value>"]}}}, "properties.a.enum"),
    ({"properties": {"a": {"items": {"const": "</arg_value>"}}}}, "properties.a"),
    ({"properties": {"a": {"properties": {"</arg_value>": {}}}}}, "properties.a.properties"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"const": "</arg_value>"}}}, "$defs.b.const"),
]


@pytest.mark.parametrize(("parameters", "key"), UNWRITABLE)
def test_what_cannot_be_written_in_tags_is_refused_by_its_key(
    engine: Engine, parameters: dict[str, Any], key: str
) -> None:
    functions = [FUNCTIONS[0], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for request in (
        Request(QUESTION, Sampling(max_tokens=1), tools=Tools(functions, True)),
        Request(QUESTION, Sampling(max_tokens=1), tools=Tools(functions), grammar=Grammar.choice(["a"])),
    ):
        if kind(engine) != "glm":
            engine.generate([request])
            continue
        with pytest.raises(RequestError, match="cannot be written in this model's tags") as caught:
            engine.submit(request)
        place = f"tools[1].function.parameters.{key}"
        assert (caught.value.param, caught.value.code) == (place, "unsupported_value")
        assert str(caught.value).startswith(f"'{place}' ")
    assert engine.generate([Request(QUESTION, Sampling(max_tokens=1), tools=Tools(functions))])[0].prompt_tokens


def test_names_and_values_that_only_look_like_tags_are_written(engine: Engine) -> None:
    parameters = {"properties": {"a b<": {"enum": [" <arg_value> "]}, "n": {"enum": [2]}}, "required": ["a b<", "n"]}
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], True, parallel=False)
    (choice,) = engine.generate([Request(QUESTION, Sampling(max_tokens=200), tools=tools)])[0].choices
    assert json.loads(choice.tool_calls[0].arguments) == {"a b<": " <arg_value> ", "n": 2}


def test_a_required_parameter_without_a_schema_is_written(engine: Engine) -> None:
    function = {"name": "f", "parameters": {"properties": {"b": {"enum": [1]}}, "required": ["a", "b"]}}
    request = Request(QUESTION, Sampling(max_tokens=400), tools=Tools([{"function": function}], True, parallel=False))
    (choice,) = engine.generate([request])[0].choices
    assert {"a", "b"} <= json.loads(choice.tool_calls[0].arguments).keys()


def test_ids_are_made_short_and_stay_pairs() -> None:
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0123456789"}, {"id": "abcdefghi"}, {}]},
        {"role": "tool", "content": "1", "tool_call_id": "call_0123456789"},
        {"role": "user", "content": "?"},
    ]
    first, second, third = with_short_ids(chat)
    ids = [call["id"] for call in first["tool_calls"]]
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert (ids[1], second["tool_call_id"]) == ("abcdefghi", ids[0])
    assert third == chat[2]
