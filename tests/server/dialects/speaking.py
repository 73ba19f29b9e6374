"""One chat in three dialects: its bodies, and its answers in one form, whole or put together from a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flask.testing import FlaskClient
from jiter import from_json

ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
EXTRAS = ("applied", "diagnostics", "baseline", "guard", "prompt_logprobs", "ignored")
THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>\n*(.*))?", re.DOTALL)
"""A chat completion's text that begins with reasoning."""
Body = dict[str, Any]


def responses_body(chat: Body) -> Body:
    """Return the body of a response that means the same as that of a chat completion."""
    body = {
        name: value for name, value in chat.items() if name not in ("messages", "max_tokens", "tools", "tool_choice")
    }
    body["max_output_tokens"] = chat["max_tokens"]
    if body.pop("logprobs", None):
        body["include"] = ["message.output_text.logprobs"]
    if form := body.pop("response_format", None):
        body["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
    if tools := chat.get("tools"):
        body["tools"] = [{"type": "function", **tool["function"]} for tool in tools]
    if isinstance(choice := chat.get("tool_choice"), dict):
        choice = {"type": "function", **choice["function"]}
    if choice:
        body["tool_choice"] = choice
    items: list[Body] = []
    for message in chat["messages"]:
        if message["role"] == "system" and not items:
            body["instructions"] = message["content"]
        elif message["role"] == "tool":
            output = _parts(message["content"])
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": output})
        else:
            if thought := message.get("reasoning_content"):
                parts = [{"type": "reasoning_text", "text": thought}]
                items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": parts})
            if message["content"]:
                items.append({"role": message["role"], "content": _parts(message["content"])})
            for call in message.get("tool_calls", ()):
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return body | {"input": items}


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        {"type": "input_image", "image_url": part["image_url"]["url"]}
        if part["type"] == "image_url"
        else {**part, "type": "input_text"}
        for part in content
    ]


def messages_body(chat: Body) -> Body | None:
    """Return the body of a message that means the same; None if there is none, as with log-probabilities."""
    if "logprobs" in chat:
        return None
    body = {name: value for name, value in chat.items() if name not in ("messages", "tools", "tool_choice")}
    if stop := body.pop("stop", None):
        body["stop_sequences"] = stop
    if form := body.pop("response_format", None):
        body["output_config"] = {"format": {"type": "json_schema", "schema": form["json_schema"]["schema"]}}
    if tools := chat.get("tools"):
        body["tools"] = [
            {"input_schema": parameters, **function}
            for function in ({**tool["function"]} for tool in tools)
            for parameters in [function.pop("parameters")]
        ]
    if choice := chat.get("tool_choice"):
        kinds = {"auto": "auto", "required": "any", "none": "none"}
        named = {"type": "tool", **choice["function"]} if isinstance(choice, dict) else {"type": kinds[choice]}
        body["tool_choice"] = named
    if (several := body.pop("parallel_tool_calls", None)) is not None:
        body["tool_choice"] = {"type": "auto", **body.get("tool_choice", {}), "disable_parallel_tool_use": not several}
    turns: list[Body] = []
    for message in chat["messages"]:
        if message["role"] == "system":
            body["system"] = message["content"]
        elif message["role"] == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": _blocks(message["content"]),
            }
            turns.append({"role": "user", "content": [result]})
        else:
            content = _blocks(message["content"])
            calls = [
                {"type": "tool_use", "id": call["id"], "name": call["function"]["name"],
                 "input": json.loads(call["function"]["arguments"])}
                for call in message.get("tool_calls", ())
            ]  # fmt: skip
            thoughts = [
                {"type": "thinking", "thinking": thought, "signature": ""}
                for thought in [message.get("reasoning_content")]
                if thought
            ]
            texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
            blocks = [*thoughts, *texts, *calls] if calls or thoughts else content
            turns.append({"role": message["role"], "content": blocks})
    return body | {"messages": turns}


def _blocks(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_image(part["image_url"]["url"]) if part["type"] == "image_url" else part for part in content]


def _image(url: str) -> Body:
    if not url.startswith("data:"):
        return {"type": "image", "source": {"type": "url", "url": url}}
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


@dataclass(frozen=True)
class Answered:
    """An answer, whatever the dialect: tokens are (prompt, answer)."""

    text: str
    calls: list[tuple[str, Any]]
    cut: bool
    tokens: tuple[int, int]
    extras: Body
    logprobs: list[float] | None = None
    reasoning: str = ""


def ask(client: FlaskClient, dialect: str, body: Body) -> Answered:
    """Return the answer to a body in a dialect, whose stream adds up to it if it is one."""
    response = client.post(ROUTES[dialect], json=body, buffered=True)
    assert response.status_code == 200, (dialect, response.text[:500])
    value = response.json if not body.get("stream") else STREAMS[dialect](response.text)
    return READERS[dialect](value)


def events(text: str) -> Iterator[Body]:
    """Yield the data of each event; its type is that of the event."""
    for event in text.strip().split("\n\n"):
        if event.startswith(":"):  # a comment
            continue
        name, _, data = event.rpartition("data: ")
        if data == "[DONE]":
            return
        value = json.loads(data)
        assert name in ("", f"event: {value.get('type')}\n")
        yield value


def _chat_of(text: str) -> Body:
    message: Body = {"content": "", "tool_calls": []}
    whole: Body = {}
    tokens: list[Body] = []
    for value in events(text):
        whole |= {name: value[name] for name in ("usage", "ignored") if value.get(name)}
        for choice in value["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            tokens += (choice["logprobs"] or {}).get("content", [])
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    message["tool_calls"].append(call)
                else:
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            if choice["finish_reason"]:
                whole["choices"] = [{**choice, "message": message, "logprobs": {"content": tokens} if tokens else None}]
    return whole


def _read_chat(value: Body) -> Answered:
    (choice,) = value["choices"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in choice["message"].get("tool_calls", ())
    ]
    extras = {name: choice[name] for name in EXTRAS if name in choice} | {
        name: value[name] for name in EXTRAS if name in value
    }
    usage, logprobs, text = value["usage"], choice["logprobs"], choice["message"]["content"] or ""
    thought = THOUGHT.fullmatch(text)
    return Answered(
        text if thought is None else thought[2] or "", calls, choice["finish_reason"] == "length",
        (usage["prompt_tokens"], usage["completion_tokens"]), extras,
        logprobs and [token["logprob"] for token in logprobs["content"]], "" if thought is None else thought[1],
    )  # fmt: skip


def _response_of(text: str) -> Body:
    """Return the response of the last event, which the events before it add up to."""
    items: list[Body] = []
    for number, value in enumerate(events(text)):
        assert value["sequence_number"] == number
        match value["type"]:
            case "response.output_item.added":
                assert value["output_index"] == len(items)
                items.append(value["item"])
            case "response.content_part.added":
                items[-1]["content"].append(value["part"])
            case "response.output_text.delta" | "response.reasoning_text.delta":
                items[-1]["content"][0]["text"] += value["delta"]
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += value["delta"]
            case "response.output_item.done":
                done = value["item"]
                if done["type"] == "message":
                    items[-1]["content"][0]["logprobs"] = done["content"][0]["logprobs"]
                assert items[-1] | {"status": done["status"]} == done
                items[-1] = done
    assert value["response"]["output"] == items
    assert value["type"] == f"response.{value['response']['status']}"
    return value["response"]  # type: ignore[no-any-return]


def _read_response(value: Body) -> Answered:
    texts = [part for item in value["output"] if item["type"] == "message" for part in item["content"]]
    thoughts = [part["text"] for item in value["output"] if item["type"] == "reasoning" for part in item["content"]]
    calls = [
        (item["name"], json.loads(item["arguments"])) for item in value["output"] if item["type"] == "function_call"
    ]
    usage = value["usage"]
    scored = [token["logprob"] for part in texts for token in part["logprobs"]]
    assert (value["incomplete_details"] is None) == (value["status"] == "completed")
    return Answered(
        "".join(part["text"] for part in texts), calls, value["status"] == "incomplete",
        (usage["input_tokens"], usage["output_tokens"]), {name: value[name] for name in EXTRAS if name in value},
        scored or None, "".join(thoughts),
    )  # fmt: skip


def _message_of(text: str) -> Body:
    blocks: list[Body] = []
    whole: Body = {}
    for value in events(text):
        match value["type"]:
            case "message_start":
                whole |= value["message"]
            case "content_block_start":
                assert value["index"] == len(blocks)
                blocks.append({**value["content_block"], "arguments": ""})
            case "content_block_delta":
                delta = value["delta"]
                name = {"input_json_delta": "partial_json", "signature_delta": "signature"}.get(
                    delta["type"], delta["type"].removesuffix("_delta")
                )
                blocks[value["index"]]["arguments" if name == "partial_json" else name] += delta[name]
            case "message_delta":
                begun = {**whole["usage"], "output_tokens": value["usage"]["output_tokens"]}
                assert begun == value["usage"] or "guard" in value, "both events count the prompt alike"
                whole |= value["delta"] | {name: value[name] for name in ("usage", *EXTRAS) if name in value}
    for block in blocks:
        arguments = block.pop("arguments")
        if block["type"] == "tool_use":
            block["input"] = _input(arguments or "{}", cut=whole["stop_reason"] in ("max_tokens", "stop_sequence"))
    return whole | {"content": blocks}


def _input(arguments: str, cut: bool) -> Any:
    """Return the input of a call, as Anthropic's SDK for Python reads its pieces."""
    return from_json(arguments.encode(), partial_mode=cut)


def _read_message(value: Body) -> Answered:
    usage = value["usage"]
    texts = [block["text"] for block in value["content"] if block["type"] == "text"]
    calls = [(block["name"], block["input"]) for block in value["content"] if block["type"] == "tool_use"]
    return Answered(
        "".join(texts), calls, value["stop_reason"] == "max_tokens",
        (usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]),
        {name: value[name] for name in EXTRAS if name in value},
        reasoning="".join(block["thinking"] for block in value["content"] if block["type"] == "thinking"),
    )  # fmt: skip


READERS: dict[str, Callable[[Body], Answered]] = {
    "chat": _read_chat, "responses": _read_response, "messages": _read_message,
}  # fmt: skip
STREAMS: dict[str, Callable[[str], Body]] = {"chat": _chat_of, "responses": _response_of, "messages": _message_of}
BODIES: dict[str, Callable[[Body], Body | None]] = {
    "chat": lambda body: body, "responses": responses_body, "messages": messages_body,
}  # fmt: skip
