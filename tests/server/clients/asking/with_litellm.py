"""LiteLLM, with the server as an OpenAI-compatible one."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from asked import MODEL, QUESTION, SHOWN, URL, Colour, end, see

litellm.suppress_debug_info = True
plain = [{"role": "user", "content": QUESTION}]
shown = [{"role": "user", "content": SHOWN}]


def ask(messages: list, model: str = MODEL, **fields: object) -> object:
    return litellm.completion(
        model=f"openai/{model}", messages=messages, api_base=URL, api_key="none", num_retries=0, max_retries=0, **fields
    )


parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tool = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": parameters},
}
see("plain", lambda: ask(plain).choices[0].message.content)
see("stream", lambda: [chunk.choices[0].delta.content for chunk in ask(plain, stream=True)])
see("stream, usage", lambda: list(ask(plain, stream=True, stream_options={"include_usage": True}))[-1])
see("picture", lambda: ask(shown).choices[0].message.content)
see("schema", lambda: ask(shown, response_format=Colour).choices[0].message.content)
see("json", lambda: ask(plain, response_format={"type": "json_object"}, max_tokens=16).choices[0].message.content)
see("tools", lambda: ask(plain, tools=[tool]))
see(
    "models",
    lambda: litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="openai", api_base=URL, api_key="none"
    ),
)
see("no such model", lambda: ask(plain, "gpt-4o"))
end("litellm")
