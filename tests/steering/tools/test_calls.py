"""What is a call in an answer and what is said, however the text comes in pieces."""

from __future__ import annotations

import random

import pytest

from steering.tools.calls import CallStream, ToolCall
from steering.tools.formats import HERMES

NAMES = frozenset({"look", "count"})


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


LOOK = '{"name": "look", "arguments": {"at": "a } \\\\\\" {", "n": [1, {}]}}'
COUNT = '{"name": "count", "arguments": {}}'
LOOKED = ToolCall("look", '{"at": "a } \\\\\\" {", "n": [1, {}]}')
COUNTED = ToolCall("count", "{}")
CASES: list[tuple[str, str, list[ToolCall]]] = [
    ("Nothing < is <tool called.\n", "Nothing < is <tool called.\n", []),
    (call(LOOK), "", [LOOKED]),
    ("I look. \n" + call(LOOK) + "\n" + call(COUNT) + "\n", "I look.", [LOOKED, COUNTED]),
    (call(COUNT) + "\nDone.", "\nDone.", [COUNTED]),
    (call('{"arguments": {"a": 1}, "name": "count"}'), "", [ToolCall("count", '{"a": 1}')]),
    (call('{"name": "count"}'), "", [COUNTED]),
    (call('{"name": "fly", "arguments": {}}'), call('{"name": "fly", "arguments": {}}'), []),
    (call('{"name": ["count"], "arguments": {}}'), call('{"name": ["count"], "arguments": {}}'), []),
    (call("[1]") + call("{"), call("[1]") + call("{"), []),
    ('<tool_call>\n{"name": "lo', '<tool_call>\n{"name": "lo', []),
    (call(LOOK)[:-25], "", [ToolCall("look", LOOKED.arguments[:-11])]),
    (call(LOOK)[:-14], "", [LOOKED]),
]


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_a_text_is_taken_apart(text: str, said: str, calls: list[ToolCall]) -> None:
    stream = CallStream(HERMES, NAMES)
    stream.feed(text, last=True)
    assert (stream.text, stream.calls) == (said, calls)


@pytest.mark.parametrize(("text", "said", "calls"), CASES)
def test_pieces_add_up_however_the_text_is_cut(text: str, said: str, calls: list[ToolCall]) -> None:
    rng = random.Random(0)
    for most in (1, 3, 9):
        stream = CallStream(HERMES, NAMES)
        heard, got = "", []
        rest = text
        while rest:
            n = rng.randint(1, most)
            piece, rest = rest[:n], rest[n:]
            more, pieces = stream.feed(piece, last=not rest)
            heard += more
            got += pieces
        assert heard == said == stream.text
        assert [one.name for one in got if one.name is not None] == [one.name for one in calls]
        for number, one in enumerate(calls):
            assert "".join(piece.arguments for piece in got if piece.number == number) == one.arguments


def test_what_is_certain_is_not_held_back() -> None:
    stream = CallStream(HERMES, NAMES)
    assert stream.feed("A star <to")[0] == "A star"
    assert stream.feed("p> of")[0] == " <top> of"
    assert [one.arguments for one in stream.feed('<tool_call>{"name": "look", "arguments": {"at": "th')[1]] == [
        "",
        '{"at": "th',
    ]
    assert [one.arguments for one in stream.feed("e top")[1]] == ["e top"]
