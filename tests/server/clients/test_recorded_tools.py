"""Recorded requests of real clients that have tools are answered with calls.

They are sent to a toy whose template knows tools; the embedded model's does not, so `test_recorded.py` has a refusal of
each.

The toy's weights are random: it calls where it must, with texts that do not end, and else says nothing that means
anything. So a call of its own is put into its mouth with `force`; that it calls when it should, or heeds what came of
it, cannot be tested with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai.types.chat import ChatCompletion

import steering
from server.app import create_app
from server.settings import Settings
from tests.families.calling import calling
from tests.server.clients.test_recorded import NEVER, RECORDED, replay, streamed, whole
from tests.server.openapi.checker import Checker

Call = tuple[str, str]
"""A function's name, and its arguments as text."""


def free(one: dict[str, Any]) -> bool:
    """Return whether the answer to a body need not call."""
    return bool(one["body"].get("tool_choice", "auto") == "auto")


BODIES = [
    pytest.param(one, id=f"{name}-{index}")
    for name, client in RECORDED.items()
    for index, one in enumerate(client["requests"])
    if "tools" in one.get("body", {})
]
FREE = [
    pytest.param(one, id=f"{name}-{index}")
    for name, client in RECORDED.items()
    for index, one in enumerate(client["requests"])
    if "tools" in one.get("body", {}) and free(one)
]
"""The requests with tools whose answers need not call."""
SHORT = {"seed": 3, "max_tokens": 160}
"""With which the calls that must be made end by themselves."""
CUT = {"seed": 3, "max_tokens": 48}
"""With which one is begun."""


@pytest.fixture(scope="module")
def caller(root: Path) -> Iterator[Checker]:
    """Yield a checker of an application whose model's template knows tools.

    It holds each answer to its schema in the application's document.
    """
    engine = steering.Engine(
        steering.load(calling(root), device="cpu"), slots=4, max_length=640, self_check=False, threads=1
    )
    engine.start()
    yield Checker(create_app(Settings(), engine=engine).test_client())
    engine.stop()


@functools.cache
def name_of(caller: Checker) -> str:
    """Return the name of the application's model."""
    return str(caller.client.get("/v1/models").json["data"][0]["id"])


def sent(caller: Checker, one: dict[str, Any], **fields: Any) -> tuple[Any, dict[str, Any]]:
    """Return the toy's answer to a recorded request, and the body that was sent."""
    fields["model"] = name_of(caller)
    answer = replay(caller, one, **fields)
    assert answer.status_code == 200, answer.text
    return answer, {**one["body"], **fields}


def asked(caller: Checker, one: dict[str, Any], **fields: Any) -> ChatCompletion:
    """Return the answer to a recorded request, not streamed."""
    return whole(*sent(caller, one, **{"stream": False, **fields}))


def must(one: dict[str, Any]) -> dict[str, Any]:
    """Return the `tool_choice` with which the model has to call: the body's own, or "required" where it need not."""
    return {"tool_choice": "required" if free(one) else one["body"]["tool_choice"]}


def calls_of(completion: ChatCompletion, one: dict[str, Any]) -> list[Call]:
    """Return the calls of an answer, after checking them against the body's functions.

    Arguments fit a function's parameters unless they were cut off.
    """
    (choice,) = completion.choices
    calls = choice.message.tool_calls or []
    functions = {tool["function"]["name"]: tool["function"] for tool in one["body"]["tools"]}
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    found = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    for name, arguments in found[:-1] if choice.finish_reason == "length" else found:
        Draft202012Validator(functions[name]["parameters"]).validate(json.loads(arguments))
    assert {name for name, _ in found} <= functions.keys()
    return found


def has_to_call(completion: ChatCompletion, one: dict[str, Any]) -> list[Call]:
    """Return the calls of an answer to a body that requires one."""
    found, (choice,) = calls_of(completion, one), completion.choices
    assert found
    assert choice.message.content is None
    assert choice.finish_reason in ("tool_calls", "length")
    assert len(found) == 1 or one["body"].get("parallel_tool_calls", True)
    return found


def joined(caller: Checker, one: dict[str, Any], **fields: Any) -> tuple[str, list[Call], str | None]:
    """Return the joined deltas of a streamed answer: text, calls, and the finish reason."""
    answer, body = sent(caller, one, **{**fields, "stream": True})
    assert answer.mimetype == "text/event-stream"
    text, calls, ended = "", dict[int, list[str]](), None
    first, *rest = [chunk.choices[0] for chunk in streamed(answer, body) if chunk.choices]
    for choice in (first, *rest):
        text += choice.delta.content or ""
        ended = choice.finish_reason
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index not in calls:
                assert piece.index == len(calls), "one behind the other"
                assert (piece.id or "").startswith("call_")
                assert piece.type == "function"
                calls[piece.index] = [piece.function.name or "", ""]
            else:
                assert (piece.id, piece.function.name) == (None, None), "said once"
            calls[piece.index][1] += piece.function.arguments or ""
    assert first.delta.content == ("" if text or not calls else None), "as OpenAI's"
    return text, [(name, arguments) for name, arguments in calls.values()], ended


def both(
    caller: Checker, one: dict[str, Any], **fields: Any
) -> tuple[ChatCompletion, tuple[str, list[Call], str | None]]:
    """Return an answer, and the joined stream of the same request.

    Both are asked for at once, so that they share the engine's steps.
    """
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(joined, caller, one, **fields)
        return asked(caller, one, **fields), other.result()


def example(schema: dict[str, Any]) -> Any:
    """Return a value of a schema of the kinds that the clients' functions have."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema["type"] == "object":
        return {name: example(of) for name, of in schema["properties"].items()}
    return {"string": "Bern", "boolean": True}[schema["type"]]


def spoken(one: dict[str, Any]) -> str:
    """Return a call of a body's first function, as a model would write it."""
    function = one["body"]["tools"][0]["function"]
    call = {"name": function["name"], "arguments": example(function["parameters"])}
    return f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


def test_every_client_that_can_has_sent_tools_and_some_require_a_call() -> None:
    sent = {str(one.id).rpartition("-")[0] for one in BODIES}
    assert sent == {name for name in RECORDED if "tools" not in NEVER.get(name, ())}
    assert 0 < len(FREE) < len(BODIES)


@pytest.mark.parametrize("one", BODIES)
def test_a_body_with_tools_is_answered_as_it_is(caller: Checker, one: dict[str, Any]) -> None:
    completion = asked(caller, one, stream=one["body"].get("stream"), max_tokens=CUT["max_tokens"])
    if free(one):
        calls_of(completion, one)
        assert completion.choices[0].finish_reason in ("stop", "length", "tool_calls")
    else:
        has_to_call(completion, one)


@pytest.mark.parametrize("one", BODIES)
def test_a_stream_of_the_calls_that_it_must_make_adds_up(caller: Checker, one: dict[str, Any]) -> None:
    completion, pieces = both(caller, one, **must(one), **CUT)
    assert pieces == ("", has_to_call(completion, one), completion.choices[0].finish_reason)


@pytest.mark.parametrize("one", FREE)
def test_a_call_of_the_model_s_own_is_found_and_streamed(caller: Checker, one: dict[str, Any]) -> None:
    function = one["body"]["tools"][0]["function"]
    completion, pieces = both(caller, one, force=spoken(one))
    ((name, arguments),) = found = calls_of(completion, one)
    assert (name, json.loads(arguments)) == (function["name"], example(function["parameters"]))
    assert completion.choices[0].message.content == "I look."
    assert completion.choices[0].finish_reason == "tool_calls"
    assert pieces == ("I look.", found, "tool_calls")


WRITTEN: list[dict[str, Any]] = [
    {},
    {"content": ""},
    {"content": None, "refusal": None, "function_call": None, "annotations": []},
]
"""Fields that clients write beside the calls of an answer that they send back."""


@pytest.mark.parametrize("one", BODIES)
def test_what_came_of_its_calls_is_read_on(caller: Checker, one: dict[str, Any]) -> None:
    first = asked(caller, one, **({"force": spoken(one)} if free(one) else SHORT))
    assert calls_of(first, one)
    assert first.choices[0].finish_reason == "tool_calls"
    own = first.choices[0].message.to_dict(mode="json")
    calls: Any = own["tool_calls"]
    came = [{"role": "tool", "tool_call_id": call["id"], "content": "It is red."} for call in calls]
    behind = [*one["body"]["messages"], own, *came]
    second, (text, pieces, ended) = both(caller, one, messages=behind, **CUT)
    assert calls_of(second, one) == pieces
    assert text or pieces
    assert ended in ("stop", "length", "tool_calls")
    lengths = [first.usage.prompt_tokens, second.usage.prompt_tokens] if first.usage and second.usage else []
    assert lengths == sorted(set(lengths))
    assert lengths


@pytest.mark.parametrize("one", BODIES)
def test_however_a_client_writes_them_calls_and_what_came_of_them_are_the_same(
    caller: Checker, one: dict[str, Any]
) -> None:
    function = one["body"]["tools"][0]["function"]
    said = {"name": function["name"], "arguments": json.dumps(example(function["parameters"]))}
    call = {"id": "call_1", "type": "function", "function": said}
    lengths = set()
    for beside in WRITTEN:
        for came in (
            {"content": "It is red."},
            {"content": [{"type": "text", "text": "It is red."}], "name": function["name"]},
        ):
            own = {"role": "assistant", "tool_calls": [call], **beside}
            told = {"role": "tool", "tool_call_id": "call_1", **came}
            answer, _ = sent(caller, one, messages=[*one["body"]["messages"], own, told], max_tokens=1)
            lengths.add(answer.json["usage"]["prompt_tokens"])
    assert len(lengths) == 1
