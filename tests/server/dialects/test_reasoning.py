"""Reasoning between a model's own tags is told apart from the answer, however its text is cut into pieces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from server.app import create_app
from server.dialects.reasoning import ReasoningStream
from server.settings import Settings
from tests.server.dialects.speaking import events
from tests.server.fakes import FakeEngine

MARKERS = ("<think>", "</think>")


def divided(pieces: list[str], prompt_end: str = "", markers: Any = MARKERS) -> list[tuple[str, str]]:
    """Return the parts of an answer that comes in pieces, neighbours of one kind joined."""
    stream = ReasoningStream(markers, prompt_end)
    parts = [part for piece in pieces for part in stream.feed(piece)]
    parts += stream.feed("", last=True)
    return [
        (kind, "".join(text for _, text in group)) for kind, group in itertools.groupby(parts, key=lambda part: part[0])
    ]


@pytest.mark.parametrize(
    ("text", "prompt_end", "expected"),
    [
        ("Red.", "", [("text", "Red.")]),
        ("<think>Hm.</think>\n\nRed.", "", [("reasoning", "Hm."), ("text", "Red.")]),
        ("\n<think>Hm.</think>Red.", "", [("reasoning", "Hm."), ("text", "Red.")]),
        ("Hm.</think>\nRed.", "assistant\n<think>\n", [("reasoning", "Hm."), ("text", "Red.")]),
        ("<think>Hm. </thin", "", [("reasoning", "Hm. </thin")]),
        ("Hm", "<think>", [("reasoning", "Hm")]),
        ("<thi", "", [("text", "<thi")]),
        ("Red <think>no</think>", "", [("text", "Red <think>no</think>")]),
        ("<think></think>Red.", "", [("text", "Red.")]),
        ("<think>a</think>b</think>c", "", [("reasoning", "a"), ("text", "b</think>c")]),
    ],
)
def test_any_cut_gives_the_same_parts(text: str, prompt_end: str, expected: list[tuple[str, str]]) -> None:
    assert divided([text], prompt_end) == expected
    assert divided([*text], prompt_end) == expected
    for cut in range(1, len(text)):
        assert divided([text[:cut], text[cut:]], prompt_end) == expected


def test_without_tags_all_is_text() -> None:
    assert divided(["<think>a</think>", "b"], markers=None) == [("text", "<think>a</think>b")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_is_an_item_and_a_block_of_its_own(stream: bool) -> None:
    engine = FakeEngine("<thi", "nk>Look", " here.</th", "ink>\n\nIt is", " red.")
    engine.can(reasoning=MARKERS)
    client = create_app(Settings(), engine=engine).test_client()
    response = client.post("/v1/responses", json={"input": "Which?", "stream": stream}, buffered=True)
    value = [*events(response.text)][-1]["response"] if stream else response.json
    thought, message = value["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Look here."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "It is red.")

    turns = [{"role": "user", "content": "Which?"}]
    response = client.post("/v1/messages", json={"messages": turns, "max_tokens": 9, "stream": stream}, buffered=True)
    if not stream:
        assert response.json["content"] == [
            {"type": "thinking", "thinking": "Look here.", "signature": ""},
            {"type": "text", "text": "It is red."},
        ]
        return
    told = [*events(response.text)]
    begun = [value["content_block"]["type"] for value in told if value["type"] == "content_block_start"]
    deltas = [value["delta"] for value in told if value["type"] == "content_block_delta"]
    assert begun == ["thinking", "text"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Look here."
    assert "".join(delta.get("text", "") for delta in deltas) == "It is red."
    assert [value["index"] for value in told if value["type"] == "content_block_stop"] == [0, 1]
