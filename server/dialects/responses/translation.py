"""The chat request that the body of a response means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.dialects.dialect import Translation
from server.dialects.reading import Chat, as_object, as_objects, as_text, refuse, unknown
from server.dialects.responses.body import ResponseRequest
from server.errors import BadRequest
from server.wire.strangers import LONGEST_NAME, ignored_fields

PREVIOUS = "previous_response_id"
LOGPROBS = "message.output_text.logprobs"
OBFUSCATION = "include_obfuscation"
SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata", "store")
"""Fields with the same name and meaning in a chat completion."""
UNUSED = ("user", "safety_identifier", "service_tier", "prompt_cache_retention", "max_tool_calls")
"""Fields that do not affect answers here: on the caller, on storage, or on tools that this server does not have."""
REFUSED = ("background", "conversation", "prompt", "context_management", "moderation")
"""Fields that ask for what this server does not have."""
ELSEWHERE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "functions": "tools",
    "function_call": "tool_choice",
    "n": None,
}
"""Fields of a chat completion, and the names that they have here."""


def translated(body: Mapping[str, Any], earlier: Callable[[str], list[dict[str, Any]]]) -> Translation:
    """Return the chat request that a body means; raises BadRequest for a body that means none.

    `earlier` returns the messages of the chat that a stored response ends, by its id.
    """
    refuse(body, REFUSED)
    for name, here in ELSEWHERE.items():
        if name in body:
            raise unknown(name, here)
    own = set(ResponseRequest.model_fields)
    chat = Chat({name: value for name, value in body.items() if name not in own and name not in UNUSED})
    chat.fields |= {name: body[name] for name in SAME if name in body}
    own_fields = {name: value for name, value in body.items() if name in own}
    if isinstance(own_fields.get("input"), list):  # the type of messages, which tells their fields, may be absent
        own_fields["input"] = [
            {"type": "message", **item} if isinstance(item, dict) else item for item in own_fields["input"]
        ]
    chat.ignored += ignored_fields(own_fields, ResponseRequest)
    if (reasoning := chat.fields.pop("reasoning", None)) is not None and reasoning != {}:
        chat.ignored.append("reasoning")
    _read_stream_options(chat)
    if body.get("instructions") is not None:
        chat.add("system", as_text(body["instructions"], "instructions"), "instructions")
    if body.get("previous_response_id") is not None:
        chat.messages += earlier(as_text(body["previous_response_id"], PREVIOUS))
        chat.places |= {f"messages[{number}]": PREVIOUS for number in range(len(chat.messages))}
        if body.get("instructions") is not None:
            chat.places["messages[0]"] = "instructions"
    _read_input(chat, body)
    if body.get("max_output_tokens") is not None:
        chat.set("max_completion_tokens", body["max_output_tokens"], "max_output_tokens")
        chat.places["max_tokens"] = "max_output_tokens"
    if body.get("prompt_cache_key"):
        chat.fields.setdefault("cache_salt", body["prompt_cache_key"])
        chat.places["cache_salt"] = "prompt_cache_key"
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise BadRequest("'truncation' must be 'auto' or 'disabled'.", "truncation")
    chat.truncates = body.get("truncation") == "auto"
    _read_scores(chat, body)
    _read_format(chat, body)
    _read_tools(chat, body)
    return chat.translated()


def _read_stream_options(chat: Chat) -> None:
    """Check `stream_options`, whose only field in this protocol, obfuscation, this server does without."""
    options = as_object(chat.fields.pop("stream_options", None) or {}, "stream_options")
    for name, value in options.items():
        if name == OBFUSCATION and not isinstance(value, bool | None):
            raise BadRequest(f"'stream_options.{name}' must be true or false.", f"stream_options.{name}")
        if name != OBFUSCATION or value:
            chat.ignored.append(f"stream_options.{name[:LONGEST_NAME]}")


def _read_input(chat: Chat, body: Mapping[str, Any]) -> None:
    value = body.get("input")
    if isinstance(value, str):
        chat.add("user", value, "input")
        return
    if not isinstance(value, list) or not value:
        raise BadRequest("'input' must be a text or a list of items.", "input", "missing_required_parameter")
    for item, place in as_objects(value, "input"):
        match item.get("type", "message" if "role" in item else None):
            case "message":
                chat.add(_role(item, place), _content(item.get("content"), f"{place}.content"), place)
            case "function_call":
                call = {name: as_text(item.get(name), f"{place}.{name}") for name in ("call_id", "name", "arguments")}
                chat.call(call["call_id"], call["name"], call["arguments"], place)
            case "function_call_output":
                content = _content(item.get("output"), f"{place}.output")
                chat.result(as_text(item.get("call_id"), f"{place}.call_id"), content, place, f"{place}.output")
            case "reasoning":
                chat.reason(_reasoning_of(item, place), place)
            case kind:
                raise BadRequest(
                    f"'{place}.type' must be one of: message, function_call, function_call_output, reasoning; got "
                    f"{str(kind)[:64]!r}.",
                    f"{place}.type",
                    "unsupported_value",
                )


def _reasoning_of(item: Mapping[str, Any], place: str) -> str:
    """Return the text of reasoning, or its summary; "" for what only its maker can decrypt."""
    for name in ("content", "summary"):
        parts = as_objects(item.get(name) or [], f"{place}.{name}", least=0)
        if texts := [as_text(part.get("text"), f"{at}.text") for part, at in parts]:
            return "\n".join(texts)
    return ""


def _role(item: Mapping[str, Any], place: str) -> str:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise BadRequest(
            f"'{place}.role' must be one of: user, assistant, system, developer; got {str(role)[:64]!r}.",
            f"{place}.role",
        )
    return str(role)


def _content(value: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    return [_part(part, at) for part, at in as_objects(value, place)]


def _part(part: dict[str, Any], place: str) -> dict[str, Any]:
    match part.get("type"):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": as_text(part.get("text"), f"{place}.text"), "span": part.get("span")}
        case "refusal":
            return {"type": "text", "text": as_text(part.get("refusal"), f"{place}.refusal")}
        case "input_image":
            if part.get("image_url") is None:
                raise BadRequest(
                    f"'{place}.image_url' is required: this server stores no files.", f"{place}.image_url",
                    "missing_required_parameter",
                )  # fmt: skip
            url = as_text(part["image_url"], f"{place}.image_url")
            return {"type": "image_url", "image_url": {"url": url, "detail": part.get("detail")}}
        case kind:
            raise BadRequest(
                f"'{place}.type' must be one of: input_text, input_image, output_text; got {str(kind)[:64]!r}.",
                f"{place}.type",
                "unsupported_value",
            )


def _read_scores(chat: Chat, body: Mapping[str, Any]) -> None:
    included = body.get("include") or []
    if not isinstance(included, list):
        raise BadRequest("'include' must be a list.", "include")
    for number, name in enumerate(included):
        if name == "reasoning.encrypted_content":  # clients ask for it as a matter of course
            chat.ignored.append(f"include[{number}]")
        elif name != LOGPROBS:
            raise BadRequest(
                f"'include[{number}]' must be {LOGPROBS!r}; got {str(name)[:64]!r}.", f"include[{number}]",
                "unsupported_value",
            )  # fmt: skip
    if LOGPROBS in included:
        chat.set("logprobs", True, "include")
        if body.get("top_logprobs") is not None:
            chat.fields["top_logprobs"] = body["top_logprobs"]
    elif body.get("top_logprobs"):
        raise BadRequest(f"'top_logprobs' needs {LOGPROBS!r} in 'include'.", "top_logprobs")


def _read_format(chat: Chat, body: Mapping[str, Any]) -> None:
    form = as_object(body.get("text") or {}, "text").get("format")
    if form is None:
        return
    form = as_object(form, "text.format")
    kind = form.get("type")
    if kind != "json_schema":
        chat.set("response_format", {"type": kind}, "text.format")
        return
    names = ("name", "description", "schema", "strict")
    schema = {name: form[name] for name in names if form.get(name) is not None}
    chat.set("response_format", {"type": kind, "json_schema": schema}, "text.format")
    chat.places["response_format.json_schema"] = "text.format"


def _read_tools(chat: Chat, body: Mapping[str, Any]) -> None:
    tools: list[dict[str, Any]] = []
    for tool, place in as_objects(body.get("tools") or [], "tools", least=0):
        if tool.get("type") != "function":
            raise BadRequest(
                f"'{place}.type' must be 'function': this server has no tools of its own; got "
                f"{str(tool.get('type'))[:64]!r}.",
                f"{place}.type",
                "unsupported_value",
            )
        names = ("name", "description", "parameters", "strict")
        tools.append(
            {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        )
        chat.places[f"tools[{len(tools) - 1}].function"] = place
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        match choice.get("type"):
            case "function":
                choice = {"type": "function", "function": {"name": choice.get("name")}}
                chat.places["tool_choice.function"] = "tool_choice"
            case "allowed_tools":
                allowed = {tool.get("name") for tool, _ in as_objects(choice.get("tools"), "tool_choice.tools")}
                tools = [tool for tool in tools if tool["function"].get("name") in allowed]
                choice = choice.get("mode")
                chat.places["tool_choice"] = "tool_choice.mode"
            case kind:
                raise BadRequest(
                    f"'tool_choice.type' must be 'function' or 'allowed_tools'; got {str(kind)[:64]!r}.",
                    "tool_choice.type",
                    "unsupported_value",
                )
    if tools:
        chat.fields["tools"] = tools
    if choice is not None:
        chat.fields["tool_choice"] = choice
