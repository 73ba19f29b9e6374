"""The anthropic package: what its README shows."""

import anthropic
from asked import MODEL, PICTURE, QUESTION, URL, Colour, end, see

client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
kind, _, data = PICTURE.removeprefix("data:").partition(";base64,")
image = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
plain = [{"role": "user", "content": QUESTION}]
shown = [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}]
parameters = {"type": "object", "properties": {"at": {"enum": ["star", "ring"]}}, "required": ["at"]}
tools = [{"name": "look", "description": "Look closer.", "input_schema": parameters}]


def ask(messages: list = shown, **fields: object) -> anthropic.types.Message:
    return client.messages.create(**{"model": MODEL, "max_tokens": 16, "messages": messages, **fields})


see("models", lambda: [one.id for one in client.models.list()])
see("plain", lambda: ask(plain).content[0].text)
see("system", lambda: ask(plain, system="Be brief.").content[0].text)
see("system of parts", lambda: ask(plain, system=[
    {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]).usage)  # fmt: skip
see("stream", lambda: [event.type for event in ask(plain, stream=True)])
see("picture", lambda: ask().content[0].text)


def streamed(**fields: object) -> object:
    with client.messages.stream(**{"model": MODEL, "max_tokens": 16, "messages": shown, **fields}) as stream:
        count = len(list(stream))
        return count, stream.get_final_message()


see("stream, accumulated", streamed)
see("count", lambda: client.messages.count_tokens(model=MODEL, messages=shown, system="Be brief.").input_tokens)
see("count of tools", lambda: client.messages.count_tokens(model=MODEL, messages=shown, tools=tools).input_tokens)
see("stop", lambda: ask(stop_sequences=["a", "e"]).stop_sequence)
see("schema", lambda: client.messages.parse(
    model=MODEL, max_tokens=64, messages=shown, output_format=Colour).parsed_output)  # fmt: skip


def extras() -> object:
    body = {"steering": {"toward": "vision"}, "diagnostics": True, "unheard_of": 1}
    whole = ask(extra_body=body)
    last = list(ask(extra_body=body, stream=True))[-1]
    assert whole.diagnostics is not None  # a field of Anthropic's own since, whose type keeps ours
    kept = whole.diagnostics.to_dict() == last.model_extra["diagnostics"]
    return [sorted(one.model_extra or {}) for one in (whole, last)], kept, sorted(whole.diagnostics.model_extra or {})


see("extras", extras)


def called(choice: str) -> object:
    fields = {"tools": tools, "extra_body": {"seed": 3}, "max_tokens": 160}
    first = ask(plain, tool_choice={"type": choice}, **fields)
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [
        {"type": "text", "text": "Closer:"}, image,
    ]}  # fmt: skip
    behind = [*plain, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    return first.content, first.stop_reason, ask(behind, **fields).stop_reason


see("tools", lambda: called("any"))
see("tools, streamed", lambda: streamed(tools=tools, tool_choice={"type": "tool", "name": "look"}, max_tokens=160))
see("diagnostics of the cache", lambda: ask(plain, diagnostics={"previous_message_id": None}).model_extra)
see("no such model", lambda: ask(plain, model="claude-0"))
see("hosted tool", lambda: ask(plain, tools=[{"type": "web_search_20250305", "name": "web_search"}]))
end("anthropic")
