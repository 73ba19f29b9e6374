"""Attention to text contexts in messages of every role, and to pictures without any, equals that of whole matrices."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from steering import Diagnose, Engine, Request, load
from steering.prompt.layout import build_prompt
from steering.prompt.spans import QUESTION
from tests.families.calling import calling
from tests.steering.chats import image, text
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.plain import Messages, Plain
from tests.steering.readouts.matrices import SAMPLING, STEPS, TOLERANCE, assert_diagnostics

CALLED = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
CLOSED = "Text context: The shop is closed."
ELSEWHERE: list[Messages] = [
    [
        {"role": "system", "content": [text(f"Be brief.\n{CLOSED}\nBe polite.")]},
        {"role": "user", "content": [image(0), text("Is it open?")]},
    ],
    [
        {"role": "user", "content": [image(0), text("Is it open?")]},
        {"role": "assistant", "content": [text("I look.")], "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "1", "content": [text("A sign."), text("It says open.", span="context")]},
    ],
]
"""Chats with a context in a system message and in a tool's result."""


@pytest.mark.parametrize("spans", ["whole", "content"])
def test_contexts_of_systems_and_of_tools_equal_whole_matrices(spans: str, root: Path) -> None:
    """The plain model's columns are found by its own tokenizer, without any layout."""
    folder = calling(root)
    engine, plain = Engine(load(folder, device="cpu"), slots=2, max_length=1024, self_check=False), Plain(folder)
    requests = [Request(chat, SAMPLING, diagnose=Diagnose(spans=spans)) for chat in ELSEWHERE]
    contexts = [CLOSED, "It says open."]
    for request, context, result in zip(requests, contexts, engine.generate(requests), strict=True):
        answer = plain.answer(cast(Messages, request.messages), STEPS)
        layout = build_prompt(engine.mllm, request.messages).layout
        assert_diagnostics(result.choices[0], answer, layout)
        decoded = [plain.tokenizer.decode(answer.ids[: end + 1]) for end in range(len(answer.ids))]
        begin = decoded[-1].index(context)
        columns = [column for column, text in enumerate(decoded) if begin < len(text) <= begin + len(context)]
        rows = layout.columns(QUESTION)[layout.columns(QUESTION) > columns[-1]].tolist()
        rows += range(answer.prompt_length, answer.attention.shape[1])
        got = result.choices[0].diagnostics
        assert got is not None
        assert got["modality"]["context_share"] == pytest.approx(
            float(answer.attention[:, rows][:, :, columns].sum(2).mean()), abs=TOLERANCE
        )
        assert got["modality"]["attention_ratio"] is not None


def test_an_ordinary_picture_and_question_have_a_share(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    chat = [{"role": "user", "content": [image(0), text("What is it?")]}]
    (result,) = make_engine("qwen2_vl").generate([Request(chat, SAMPLING, diagnose=Diagnose(["modality"]))])
    assert result.choices[0].diagnostics is not None
    got = result.choices[0].diagnostics["modality"]
    answer = load_plain("qwen2_vl").answer(chat, STEPS)
    vision = (answer.ids == load_plain("qwen2_vl").model.config.image_token_id).nonzero()[:, 0]
    question = build_prompt(make_engine("qwen2_vl").mllm, chat).layout.columns(QUESTION).tolist()
    rows = question + list(range(answer.prompt_length, answer.attention.shape[1]))
    share = float(answer.attention[:, rows][:, :, vision].sum(2).mean())
    assert 0.05 < share < 0.95
    assert got["image_share"] == pytest.approx(share, abs=TOLERANCE)
    assert (got["attention_ratio"], got["reason"], got["context_share"]) == (None, "no_context", None)
