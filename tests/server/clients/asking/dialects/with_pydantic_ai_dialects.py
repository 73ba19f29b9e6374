"""Pydantic AI's agents over responses and over Anthropic's messages."""

import asyncio

from anthropic import AsyncAnthropic
from asked import MODEL, PICTURE, QUESTION, URL, Colour, end, get_weather, see
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def responses(name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=URL, api_key="none"))


def messages(name: str = MODEL) -> AnthropicModel:
    client = AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key="none", max_retries=0)
    return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))


async def streamed(model: object) -> object:
    async with Agent(model).run_stream(QUESTION) as result:
        return [text async for text in result.stream_text(delta=True)]


shown = [QUESTION, BinaryContent.from_data_uri(PICTURE)]
short = {"max_tokens": 160, "extra_body": {"seed": 3}}
for kind, model in (("responses", responses), ("messages", messages)):
    see(f"{kind}, plain", lambda model=model: Agent(model(), instructions="Be brief.").run_sync(QUESTION).output)
    see(f"{kind}, stream", lambda model=model: asyncio.run(streamed(model())))
    see(f"{kind}, picture", lambda model=model: Agent(model()).run_sync(shown).output)
    see(f"{kind}, tool output", lambda model=model: Agent(model(), output_type=Colour, model_settings=short, retries=0)
        .run_sync(QUESTION).output)  # fmt: skip
    see(f"{kind}, tools", lambda model=model: Agent(model(), tools=[get_weather], model_settings=short)
        .run_sync(QUESTION).output)  # fmt: skip
    see(f"{kind}, no such model", lambda model=model: Agent(model("gpt-4o")).run_sync(QUESTION).output)
see("responses, native", lambda: Agent(responses(), output_type=NativeOutput(Colour)).run_sync(QUESTION).output)
end("pydantic-ai-slim")
