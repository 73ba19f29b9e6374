"""LiteLLM, which passes responses and Anthropic's messages on."""

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from asked import MODEL, PICTURE, QUESTION, URL, end, see

litellm.suppress_debug_info = True
kind, _, data = PICTURE.removeprefix("data:").partition(";base64,")
seen = [{"role": "user", "content": [
    {"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
]}]  # fmt: skip
shown = [{"role": "user", "content": [
    {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}, {"type": "text", "text": QUESTION},
]}]  # fmt: skip
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
named = {"name": "get_weather", "description": "The weather."}


def respond(given: object, model: str = MODEL, **fields: object) -> object:
    return litellm.responses(
        model=f"openai/{model}", input=given, api_base=URL, api_key="none", num_retries=0, **fields
    )


def message(messages: list, **fields: object) -> object:
    async def read() -> object:
        answer = await litellm.anthropic.messages.acreate(**{
            "model": f"anthropic/{MODEL}", "messages": messages, "max_tokens": 16, "api_base": URL.removesuffix("/v1"),
            "api_key": "none", **fields,
        })  # fmt: skip
        return len([chunk async for chunk in answer]) if hasattr(answer, "__aiter__") else answer

    return asyncio.run(read())


see("responses", lambda: respond(QUESTION).output_text)
see("responses, stream", lambda: [str(event.type) for event in respond(QUESTION, stream=True)])
see("responses, picture", lambda: respond(seen).output_text)
see("responses, tools", lambda: respond(QUESTION, tools=[{"type": "function", "parameters": parameters, **named}],
    tool_choice="required", max_output_tokens=160).output[0])  # fmt: skip
see("responses, no such model", lambda: respond(QUESTION, "gpt-4o"))
see("messages", lambda: message([{"role": "user", "content": QUESTION}]))
see("messages, picture", lambda: message(shown))
see("messages, stream", lambda: message(shown, stream=True))
named_schema = [{"input_schema": parameters, **named}]
see("messages, tools", lambda: message(shown, tools=named_schema, tool_choice={"type": "any"}, max_tokens=160))
see("messages, no such model", lambda: message(shown, model="anthropic/claude-0"))
end("litellm")
