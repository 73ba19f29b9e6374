"""The request that has a served answer read: what shaped the prompt stays, and what chose the answer goes."""

from __future__ import annotations

from typing import Any

import pytest

from server.observe.forcing import SAMPLING, body_of
from server.observe.served import ServedAnswer
from server.wire.chat import ChatRequest, with_interventions
from server.wire.parse import checked
from steering.protocol.request import RANGES

MESSAGES = [{"role": "user", "content": "Hi"}]
PROMPT = {
    "messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"enable_thinking": False}, "min_pixels": 100, "mm_processor_kwargs": {"max_pixels": 1000},
    "steering": {"toward": "vision"}, "documents": [{"text": "x"}],
}  # fmt: skip
CHOICE = {
    "n": 3, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5, "stop": ["x"],
    "response_format": {"type": "json_object"},
    "tool_choice": "required", "store": True, "min_tokens": 2, "guided_regex": "a+", "return_token_ids": True,
    "baseline": True, "metadata": {"shop": "9", "answer_correct": "perhaps"}, **dict.fromkeys(RANGES, 1),
}  # fmt: skip


def body(text: str | None = "Hello.", readouts: Any = None, **more: Any) -> dict[str, Any]:
    request = {**PROMPT, **CHOICE, "model": more.pop("model", "llava-hf/llava-1.5-7b")}
    return body_of(ServedAnswer("q", 1, request, text, **more), "mine", readouts)


def test_what_shaped_the_prompt_stays_and_what_chose_the_answer_goes() -> None:
    assert body(finish_reason="stop") == {
        **PROMPT, "model": "mine", "force": "Hello.", "tool_choice": "auto", "temperature": 0, "logprobs": True,
        "diagnostics": True, "metadata": {"shop": "9", "observed": "q", "observed_choice": "1"},
    }  # fmt: skip


def test_every_field_that_samples_is_known() -> None:
    """A field of a request that chooses the answer would change, or forbid, what is forced."""
    assert set(RANGES) <= SAMPLING
    kept = set(with_interventions(ChatRequest).model_fields) - SAMPLING - set(with_interventions(ChatRequest).asking)
    assert kept == {
        "model", "messages", "tools", "tool_choice", "functions", "function_call", "min_pixels", "max_pixels",
        "mm_processor_kwargs", "cache_salt", "chat_template_kwargs", "continue_final_message", "add_generation_prompt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("served", "forced"),
    [
        ({"finish_reason": "stop"}, {"force": "Hello."}),
        ({"finish_reason": None}, {"force": "Hello."}),
        ({"finish_reason": "length"}, {"force": "Hello.", "ignore_eos": True}),
        ({"finish_reason": "stop", "stop": "\n"}, {"force": "Hello.\n", "ignore_eos": True, "stop": ["\n"]}),
        ({"finish_reason": "length", "token_ids": (5, 6)}, {"force": [5, 6], "max_tokens": 2}),
    ],
)
def test_the_end_is_the_one_that_was_served(served: dict[str, Any], forced: dict[str, Any]) -> None:
    found = body(**served)
    names = ("force", "ignore_eos", "stop", "max_tokens")
    assert {name: found[name] for name in names if name in found} == forced


def test_a_preset_of_this_model_is_its_own_and_any_other_name_is_another_engines() -> None:
    assert [body(model=name)["model"] for name in ("mine", "mine@sage", "other@sage", "gpt")] == [
        "mine", "mine@sage", "mine", "mine",
    ]  # fmt: skip


def test_metadata_leaves_room_for_the_ids() -> None:
    many = {str(number): "x" * 600 for number in range(16)}
    served = ServedAnswer("q" * 900, 0, {"messages": MESSAGES, "metadata": many}, "a", answer_id="c")
    chat = checked(body_of(served, "mine", ["focus"]), with_interventions(ChatRequest))
    assert chat.metadata is not None
    assert len(chat.metadata) == 16
    assert chat.metadata["observed_answer"] == "c"
