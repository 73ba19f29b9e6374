"""The chat request that the body of a message means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.dialects.dialect import Translation
from server.dialects.messages.body import CountRequest, MessageRequest
from server.dialects.reading import Chat, as_object, as_objects, as_text, refuse, unknown
from server.encode import dumps
from server.errors import BadRequest
from server.wire.strangers import ignored_fields

CACHE_CONTROL = "cache_control"
SAME = ("model", "stream", "temperature", "top_p", "top_k", "max_tokens")
"""Fields with the same name and meaning in a chat completion."""
UNUSED = ("service_tier", CACHE_CONTROL, "inference_geo")
"""Fields that do not affect answers here."""
REFUSED = ("container", "mcp_servers", "context_management")
"""Fields that ask for what this server does not have."""
ELSEWHERE = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stream_options": None,
    "functions": "tools",
    "function_call": "tool_choice",
    "n": None,
    "store": None,
    "logprobs": None,
    "top_logprobs": None,
}
"""Fields of a chat completion, and the names that they have here."""
CACHE = "previous_message_id"
THINKING = ("enabled", "adaptive", "disabled")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translated(body: Mapping[str, Any], counted: bool = False) -> Translation:
    """Return the chat request that a body means, or one whose tokens are to be `counted`.

    Raises BadRequest for a body that means none.
    """
    refuse(body, REFUSED)
    for name, here in ELSEWHERE.items():
        if name in body:
            raise unknown(name, here)
    form = CountRequest if counted else MessageRequest
    own = set(form.model_fields)
    chat = Chat({name: value for name, value in body.items() if name not in own and name not in UNUSED})
    chat.places = {}
    chat.fields |= {name: body[name] for name in SAME if name in body}
    chat.ignored += ignored_fields({name: value for name, value in body.items() if name in own}, form)
    _check_cache_control(body, "")
    _read_thinking(chat)
    _read_diagnostics(chat)
    if not counted and body.get("max_tokens") is None:
        raise BadRequest("'max_tokens' is required.", "max_tokens", "missing_required_parameter")
    if body.get("system"):
        chat.add("system", _texts(body["system"], "system"), "system")
    for turn, place in as_objects(body.get("messages"), "messages"):
        _read_turn(chat, turn, place)
    _read_beginning(chat)
    if body.get("stop_sequences"):
        chat.set("stop", body["stop_sequences"], "stop_sequences")
    metadata = as_object(body.get("metadata") or {}, "metadata")
    if metadata.get("user_id", "") is None:  # Anthropic's null
        metadata = {name: value for name, value in metadata.items() if name != "user_id"}
    if metadata:
        chat.fields["metadata"] = metadata
    form_of_text = as_object(body.get("output_config") or {}, "output_config").get("format")
    if form_of_text is not None:
        schema = as_object(form_of_text, "output_config.format").get("schema")
        chat.set("response_format", {"type": "json_schema", "json_schema": {"schema": schema}}, "output_config.format")
        chat.places |= {
            "response_format.json_schema": "output_config.format",
            "response_format.json_schema.strict": "",
        }
    _read_tools(chat, body)
    return chat.translated()


def _check_cache_control(item: Mapping[str, Any], place: str) -> None:
    """Raise BadRequest for a `cache_control` that Anthropic's clients do not send; prefixes are cached without one."""
    control = item.get(CACHE_CONTROL)
    if control is None:
        return
    at = f"{place}.{CACHE_CONTROL}" if place else CACHE_CONTROL
    if as_object(control, at).get("type") != "ephemeral":
        raise BadRequest(f"'{at}.type' must be 'ephemeral'; got {str(control.get('type'))[:64]!r}.", f"{at}.type")
    if control.get("ttl") not in (None, "5m", "1h"):
        raise BadRequest(f"'{at}.ttl' must be '5m' or '1h'; got {str(control['ttl'])[:64]!r}.", f"{at}.ttl")


def _read_thinking(chat: Chat) -> None:
    """Check `thinking`, which is ignored: the model reasons as its chat template has it."""
    thinking = as_object(chat.fields.pop("thinking", None) or {"type": "disabled"}, "thinking")
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in THINKING:
        raise BadRequest(
            f"'thinking.type' must be one of: {', '.join(THINKING)}; got {str(kind)[:64]!r}.", "thinking.type"
        )
    if kind == "enabled" and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 1):
        raise BadRequest("'thinking.budget_tokens' must be a whole number above 0.", "thinking.budget_tokens")
    if kind != "disabled":
        chat.ignored.append("thinking")


def _read_diagnostics(chat: Chat) -> None:
    """Leave out Anthropic's own part of `diagnostics`, which asks why its cache missed."""
    diagnostics = chat.fields.get("diagnostics")
    if isinstance(diagnostics, dict) and CACHE in diagnostics:
        others = {name: value for name, value in diagnostics.items() if name != CACHE}
        chat.fields["diagnostics"] = others or None
        chat.ignored.append(f"diagnostics.{CACHE}")


def _read_beginning(chat: Chat) -> None:
    """Continue a last message of the assistant that ends with a text, as Anthropic's API does."""
    last: Mapping[str, Any] = chat.messages[-1] if chat.messages else {}
    content = last.get("content")
    ends = content[-1].get("text") if isinstance(content, list) and content else content
    if last.get("role") == "assistant" and ends and not last.get("tool_calls"):
        chat.fields.setdefault("continue_final_message", True)


def _read_turn(chat: Chat, turn: dict[str, Any], place: str) -> None:
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant"):
        raise BadRequest(f"'{place}.role' must be 'user' or 'assistant'; got {str(role)[:64]!r}.", f"{place}.role")
    if isinstance(content, str):
        chat.add(role, content, place)
        return
    parts: list[dict[str, Any]] = []
    places: list[str] = []

    def flush() -> None:
        if parts:
            chat.add(role, [*parts], place)
            here = f"messages[{len(chat.messages) - 1}]"
            for number, (part, at) in enumerate(zip(parts, places, strict=True)):
                chat.places[f"{here}.content[{number}]"] = at
                if part["type"] == "image_url":
                    chat.places[f"{here}.content[{number}].image_url"] = f"{at}.source"
            parts.clear()
            places.clear()

    for block, at in as_objects(content, f"{place}.content"):
        _check_cache_control(block, at)
        match block.get("type"):
            case "text" | "image":
                parts.append(_part(block, at))
                places.append(at)
            case "tool_use" if role == "assistant":
                flush()
                arguments = dumps(as_object(block.get("input"), f"{at}.input"))
                identity, name = (as_text(block.get(field), f"{at}.{field}") for field in ("id", "name"))
                chat.call(identity, name, arguments, at)
            case "tool_result" if role == "user":
                flush()
                inner = block.get("content")
                result = "" if inner is None else inner
                if not isinstance(result, str):
                    result = [_part(part, where) for part, where in as_objects(result, f"{at}.content")]
                identity = as_text(block.get("tool_use_id"), f"{at}.tool_use_id")
                chat.result(identity, result, at, f"{at}.content")
            case "thinking" | "redacted_thinking" if role == "assistant":
                flush()
                thinking = as_text(block.get("thinking"), f"{at}.thinking") if block["type"] == "thinking" else ""
                chat.reason(thinking, at)
            case kind:
                raise BadRequest(
                    f"'{at}.type' cannot be {str(kind)[:64]!r} in a message of the {role}; allowed: text, image, "
                    f"{'tool_use, thinking' if role == 'assistant' else 'tool_result'}.",
                    f"{at}.type",
                    "unsupported_value",
                )
    flush()


def _part(block: dict[str, Any], place: str) -> dict[str, Any]:
    _check_cache_control(block, place)
    if block.get("type") == "text":
        return {"type": "text", "text": as_text(block.get("text"), f"{place}.text"), "span": block.get("span")}
    if block.get("type") != "image":
        raise BadRequest(
            f"'{place}.type' must be 'text' or 'image'; got {str(block.get('type'))[:64]!r}.", f"{place}.type",
            "unsupported_value",
        )  # fmt: skip
    source = as_object(block.get("source"), f"{place}.source")
    match source.get("type"):
        case "base64":
            kind, data = (as_text(source.get(name), f"{place}.source.{name}") for name in ("media_type", "data"))
            url = f"data:{kind};base64,{data}"
        case "url":
            url = as_text(source.get("url"), f"{place}.source.url")
        case kind:
            raise BadRequest(
                f"'{place}.source.type' must be 'base64' or 'url': this server stores no files; got {str(kind)[:64]!r}.",
                f"{place}.source.type",
                "unsupported_value",
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(value: Any, place: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return value
    return [_part({**block, "type": "text"}, at) for block, at in as_objects(value, place)]


def _read_tools(chat: Chat, body: Mapping[str, Any]) -> None:
    tools = []
    for tool, place in as_objects(body.get("tools") or [], "tools", least=0):
        _check_cache_control(tool, place)
        if tool.get("type") not in (None, "custom"):
            raise BadRequest(
                f"'{place}.type' must be 'custom': this server has no tools of its own; got {str(tool['type'])[:64]!r}.",
                f"{place}.type",
                "unsupported_value",
            )
        function = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
        function["parameters"] = as_object(tool.get("input_schema"), f"{place}.input_schema")
        present = {name: value for name, value in function.items() if value is not None}
        tools.append({"type": "function", "function": present})
        here = f"tools[{len(tools) - 1}].function"
        chat.places |= {here: place, f"{here}.parameters": f"{place}.input_schema"}
    if tools:
        chat.fields["tools"] = tools
    if body.get("tool_choice") is None:
        return
    choice = as_object(body["tool_choice"], "tool_choice")
    kind = choice.get("type")
    if kind == "tool":
        named = as_text(choice.get("name"), "tool_choice.name")
        chat.fields["tool_choice"] = {"type": "function", "function": {"name": named}}
    elif isinstance(kind, str) and kind in CHOICES:
        chat.fields["tool_choice"] = CHOICES[kind]
    else:
        raise BadRequest(
            f"'tool_choice.type' must be one of: auto, any, tool, none; got {str(kind)[:64]!r}.", "tool_choice.type"
        )
    if choice.get("disable_parallel_tool_use"):
        chat.fields["parallel_tool_calls"] = False
