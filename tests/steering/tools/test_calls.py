"""The separation of calls and text in an answer, whatever pieces the text comes in."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from steering.tools.calls import CallStream, ToolCall
from steering.tools.formats import FORMATS, GLM, HERMES, MINISTRAL, MISTRAL, Format

NAMES = frozenset({"look", "count"})


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


LOOK = '{"name": "look", "arguments": {"at": "a } \\\\\\" {", "n": [1, {}]}}'
COUNT = '{"name": "count", "arguments": {}}'
LOOKED = ToolCall("look", '{"at": "a } \\\\\\" {", "n": [1, {}]}')
COUNTED = ToolCall("count", "{}")
HALF = '{"arguments": {"a": "\\ud800"}, "name": "count"}'  # of a character, which no answer in UTF-8 can hold
CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("Nothing < is <tool called.\n", "Nothing < is <tool called.\n", []),
    (call(LOOK), "", [LOOKED]),
    ("I look. \n" + call(LOOK) + "\n" + call(COUNT) + "\n", "I look.", [LOOKED, COUNTED]),
    (call(COUNT) + "\nDone.", "\nDone.", [COUNTED]),
    (call('{"arguments": {"a": 1}, "name": "count"}'), "", [ToolCall("count", '{"a": 1}')]),
    (call('{"name": "count"}'), "", [COUNTED]),
    (call('{"name": "fly", "arguments": {}}'), call('{"name": "fly", "arguments": {}}'), []),
    (call('{"name": ["count"], "arguments": {}}'), call('{"name": ["count"], "arguments": {}}'), []),
    (call(HALF), call(HALF), []),
    (call("[1]") + call("{"), call("[1]") + call("{"), []),
    ('<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', []),
    (call(LOOK)[:-25], "", [ToolCall("look", LOOKED.arguments[:-11])]),
    (call(LOOK)[:-14], "", [LOOKED]),
]


def pairs(name: str, *arguments: tuple[str, str], gap: str = "\n") -> str:
    """Return a call as GLM writes it."""
    tags = "".join(f"<arg_key>{k}</arg_key>{gap}<arg_value>{v}</arg_value>{gap}" for k, v in arguments)
    return f"<tool_call>{name}{gap}{tags}</tool_call>"


NAMED, OTHER = ToolCall("look", '{"at": "a ]} \\" [", "n": [1, {}]}'), '{"name": "look", "arguments": {}}'
LISTED = '{"name": "look", "arguments": ' + NAMED.arguments
ARGS = "[TOOL_CALLS]look[ARGS]" + NAMED.arguments
PAIRED = ToolCall("look", '{"at": "a <b> \\"c\\"\\n", "n": [1, {}], "m": "x y"}')
PAIRS = (("at", 'a <b> "c"\n'), ("n", "[1, {}]"), ("m", "x y"))
TEXTS = {"look": frozenset({"at"})}
FORMS: list[tuple[Format, str, str, list[ToolCall]]] = [
    *((HERMES, *case) for case in CASES),
    (MISTRAL, f"[TOOL_CALLS] [{LISTED}}}]", "", [NAMED]),
    (MISTRAL, f'Yes.\n[TOOL_CALLS][{LISTED}, "id": "abc123XYZ"}}, {COUNT}]', "Yes.", [NAMED, COUNTED]),
    (MISTRAL, f"[TOOL_CALLS] {LISTED}}}]", "", [NAMED]),
    (MISTRAL, '[TOOL_CALLS] [{"arguments": {"a": "]"}, "name": "count"}]', "", [ToolCall("count", '{"a": "]"}')]),
    (MISTRAL, '[TOOL_CALLS] [{"name": "fly", "arguments": {}}]', '[TOOL_CALLS] [{"name": "fly", "arguments": {}}]', []),
    (MISTRAL, f"[TOOL_CALLS] [{LISTED}"[:-12], "", [ToolCall("look", NAMED.arguments[:-12])]),
    (MISTRAL, "The [TOOL is", "The [TOOL is", []),
    (MINISTRAL, ARGS, "", [NAMED]),
    (MINISTRAL, f"Yes. {ARGS}[TOOL_CALLS]count[CALL_ID]abc123XYZ[ARGS]{{}}", "Yes.", [NAMED, COUNTED]),
    (MINISTRAL, "[TOOL_CALLS]count{}", "", [COUNTED]),
    (MINISTRAL, f"[TOOL_CALLS]fly[ARGS]{{}}{ARGS}", "[TOOL_CALLS]fly[ARGS]{}", [NAMED]),
    (GLM, pairs("look", *PAIRS), "", [PAIRED]),
    (GLM, "Yes.\n" + pairs("look", *PAIRS, gap="") + pairs("count", gap=""), "Yes.", [PAIRED, COUNTED]),
    (GLM, pairs("count") + "\nDone.", "\nDone.", [COUNTED]),
    (GLM, pairs("fly", ("a", "1")), pairs("fly", ("a", "1")), []),
    (GLM, pairs("count", ("a", "1")).replace("</arg_value>\n", "</arg_value>?"), "", [ToolCall("count", '{"a": 1}')]),
    (GLM, pairs("count", ("a", '"\\ud800"')), "", [ToolCall("count", '{"a": "\\"\\\\ud800\\""}')]),
    (GLM, pairs("look", *PAIRS)[:54], "", [ToolCall("look", '{"at": "a <b>')]),
    (GLM, pairs("count", ("a", "12"))[:-20], "", [ToolCall("count", '{"a": ')]),
]
"""GLM's of `look` has a text, `at`; what else is no JSON is one, too."""


@pytest.mark.parametrize(("form", "text", "speech", "calls"), FORMS)
def test_a_text_is_split_into_speech_and_calls(form: Format, text: str, speech: str, calls: list[ToolCall]) -> None:
    stream = CallStream(form, NAMES, TEXTS)
    stream.feed(text, last=True)
    assert (stream.text, stream.calls) == (speech, calls)


@pytest.mark.parametrize(("form", "text", "speech", "calls"), FORMS)
def test_streamed_pieces_add_up_wherever_the_text_is_cut(
    form: Format, text: str, speech: str, calls: list[ToolCall]
) -> None:
    rng = random.Random(0)
    for most in (1, 3, 9):
        stream = CallStream(form, NAMES, TEXTS)
        streamed, got = "", []
        remaining = text
        while remaining:
            n = rng.randint(1, most)
            piece, remaining = remaining[:n], remaining[n:]
            more, pieces = stream.feed(piece, last=not remaining)
            streamed += more
            got += pieces
        assert streamed == speech == stream.text
        assert [piece.name for piece in got if piece.name is not None] == [call_.name for call_ in calls]
        for number, expected_call in enumerate(calls):
            assert "".join(piece.arguments for piece in got if piece.number == number) == expected_call.arguments


INVITED = "<tool_call>count<", "[TOOL_CALLS]count{", 'a \n<tool_call>{"name": "count", "arguments": {}}</tool_call>'
"""Texts that a format may ask for, and that read like calls."""
FORMATTED: list[tuple[Format, str, str, list[ToolCall]]] = [
    *((form, json.dumps({"a": text}), json.dumps({"a": text}), []) for form in FORMATS for text in INVITED),
    *((form, " " + text, " " + text, []) for form in FORMATS for text in INVITED),
    (HERMES, "<tool", "<tool", []),
    (HERMES, "<tool_call> a \n", "<tool_call> a \n", []),
    (HERMES, call(COUNT) + "\n" + call(LOOK)[:20], "", [COUNTED]),
    (MISTRAL, f"[TOOL_CALLS] [{LISTED}}}, {COUNT}"[:-20], "", [NAMED]),
    (MISTRAL, f"[TOOL_CALLS] [{LISTED}}}, {COUNT}]", "", [NAMED, COUNTED]),
    (MISTRAL, "[TOOL_CALLS] x", "[TOOL_CALLS] x", []),
    (MINISTRAL, ARGS + "[TOOL_CALLS]lo", "", [NAMED]),
    (MINISTRAL, "[TOOL_CALLS] x", "[TOOL_CALLS] x", []),
    (GLM, pairs("count") + "\n<tool_call>lo", "", [COUNTED]),
]


@pytest.mark.parametrize(("form", "text", "speech", "calls"), FORMATTED)
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_an_answer_with_a_format_is_all_text_or_all_calls(
    form: Format, text: str, speech: str, calls: list[ToolCall], size: int
) -> None:
    stream = CallStream(form, NAMES, TEXTS, formatted=True)
    streamed = "".join(stream.feed(text[at : at + size])[0] for at in range(0, len(text), size))
    streamed += stream.feed("", last=True)[0]
    assert (streamed, stream.text, stream.calls) == (speech, speech, calls)


THINK = ("<think>", "</think>")
SAYING = (
    (HERMES, call(COUNT)), (GLM, pairs("count")), (MISTRAL, f"[TOOL_CALLS] [{COUNT}]"),
    (MINISTRAL, "[TOOL_CALLS]count[ARGS]{}"),
)  # fmt: skip
"""A call in each format."""


@pytest.mark.parametrize(("form", "said"), SAYING)
@pytest.mark.parametrize(("prompt_end", "begun"), [("", "\n<think>"), ("assistant\n<think>\n", "")])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_a_call_within_the_reasoning_is_reasoning(
    form: Format, said: str, prompt_end: str, begun: str, size: int
) -> None:
    thought = f"{begun}I could {said} \n</thi or {said}\n"
    for text, speech, calls in (
        (f"{thought}</think>\n\nNow.\n{said}", f"{thought}</think>\n\nNow.", [COUNTED]),
        (f"{thought}</think>\n\n{said}", f"{thought}</think>", [COUNTED]),
        (f"{thought}</think>\n\nNo.", f"{thought}</think>\n\nNo.", []),
        (thought, thought, []),
        (f"{thought}</thi", f"{thought}</thi", []),
    ):
        stream = CallStream(form, NAMES, TEXTS, reasoning=THINK, prompt_end=prompt_end)
        streamed = "".join(stream.feed(text[at : at + size])[0] for at in range(0, len(text), size))
        streamed += stream.feed("", last=True)[0]
        assert (streamed, stream.text, stream.calls) == (speech, speech, calls)


@pytest.mark.parametrize(("form", "said"), SAYING)
@pytest.mark.parametrize("before", ["", "<thi", "I <think>"])
def test_an_answer_that_does_not_begin_with_reasoning_calls_at_once(form: Format, said: str, before: str) -> None:
    for size in (1, 1000):
        stream, text = (
            CallStream(form, NAMES, TEXTS, reasoning=THINK, prompt_end="<think>\n\n</think>\n\n"),
            before + said,
        )
        for at in range(0, len(text), size):
            stream.feed(text[at : at + size])
        stream.feed("", last=True)
        assert (stream.text, stream.calls) == (before, [COUNTED])


def test_reasoning_is_not_held_back() -> None:
    stream = CallStream(HERMES, NAMES, reasoning=THINK, prompt_end="<think>\n")
    assert [stream.feed(piece)[0] for piece in ("I <tool_call>", " b </th", "e")] == ["I <tool_call>", " b ", "</the"]


def fed(stream: CallStream, text: str, size: int) -> tuple[str, list[ToolCall]]:
    """Return the text and calls of an answer that comes in pieces and is cut off, which add up."""
    streamed = "".join(stream.feed(text[at : at + size])[0] for at in range(0, len(text), size))
    streamed += stream.feed("", last=True, cut_off=True)[0]
    assert streamed == stream.text
    return streamed, stream.calls


REORDERED = '{"arguments": {"a": "]} b"}, "name": "count"}'


@pytest.mark.parametrize(
    ("form", "said"),
    [*SAYING, (HERMES, call(REORDERED)), (MISTRAL, f"[TOOL_CALLS] [{REORDERED}]"), (HERMES, call(LOOK))],
)
@pytest.mark.parametrize("options", [{}, {"formatted": True}, {"reasoning": THINK, "prompt_end": "<think>"}])
def test_the_head_of_a_call_that_is_cut_off_is_no_text(form: Format, said: str, options: dict[str, Any]) -> None:
    before = {"formatted": "", "reasoning": "Hm.</think>\n\nI call."}.get(next(iter(options), ""), "I call.")
    gap = " \n" * bool(before)
    for end in range(len(said)):
        for size in (1, 3, 1000):
            text, calls = fed(CallStream(form, NAMES, TEXTS, **options), before + gap + said[:end], size)
            assert text == (before if end > 1 else before + gap + said[:end]), said[:end]
            assert len(calls) <= 1
    assert len(fed(CallStream(form, NAMES, TEXTS, **options), before + gap + said, 3)[1]) == 1


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "a < b <"), (HERMES, "<tool_call> a"), (HERMES, '<tool_call>{"name": "fl'), (GLM, "<tool_call>fl"),
        (HERMES, '<tool_call>{"name": "loo", '), (HERMES, '<tool_call>{"name": ["look"], '), (GLM, "<tool_call>loo\n"),
        (HERMES, '<tool_call>{"name": null'), (HERMES, '<tool_call>{"name": "look", "arguments": "x'),
        (GLM, "<tool_call>look it"),
        (HERMES, "<tool_call>[{"), (HERMES, call('{"name": "fly", "arguments": {}}')), (HERMES, call('{"name"')),
        (MISTRAL, '[TOOL_CALLS] [{"name": "fly", "argu'), (MISTRAL, '[TOOL_CALLS] [1, {"na'),
        (MISTRAL, '[TOOL_CALLS] [{"arguments": {}}, "a'),
        (MINISTRAL, "[TOOL_CALLS]fly[ARGS]"), (MINISTRAL, "[TOOL_CALLS]look, "),
    ],
)  # fmt: skip
def test_what_cannot_become_a_call_is_text_where_it_is_cut_off(form: Format, text: str) -> None:
    for size in (1, 3, 1000):
        assert fed(CallStream(form, NAMES, TEXTS), text, size) == (text, [])


def test_certain_text_is_not_held_back() -> None:
    assert CallStream(HERMES, NAMES, formatted=True).feed("{<tool_call>")[0] == "{<tool_call>"
    stream = CallStream(HERMES, NAMES)
    assert stream.feed("A star <to")[0] == "A star"
    assert stream.feed("p> of")[0] == " <top> of"
    assert [piece.arguments for piece in stream.feed('<tool_call>{"name": "look", "arguments": {"at": "th')[1]] == [
        "",
        '{"at": "th',
    ]
    assert [piece.arguments for piece in stream.feed("e top")[1]] == ["e top"]


def test_texts_in_tags_are_not_held_back() -> None:
    stream = CallStream(GLM, NAMES, TEXTS)
    begun = stream.feed('<tool_call>look\n<arg_key>at</arg_key><arg_value>the "to')[1]
    assert "".join(piece.arguments for piece in begun) == '{"at": "the \\"to'
    assert [piece.arguments for piece in stream.feed("p</arg_v")[1]] == ["p"]
    assert [piece.arguments for piece in stream.feed("al</arg_value></tool_call>")[1]] == ['</arg_val"}']


def test_a_call_is_incomplete_until_its_arguments_are_complete() -> None:
    text = call(COUNT) + call(LOOK)
    states = set()
    for end in range(len(text) + 1):
        stream = CallStream(HERMES, NAMES)
        stream.feed(text[:end], last=True)
        last = stream.calls[-1].arguments if stream.calls else "{}"
        assert stream.cut == (last not in (COUNTED.arguments, LOOKED.arguments)), text[:end]
        states.add((stream.cut, len(stream.calls)))
    assert states == {(False, 0), (True, 1), (False, 1), (True, 2), (False, 2)}
