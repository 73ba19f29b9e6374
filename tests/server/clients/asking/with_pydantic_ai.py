"""Pydantic AI's agents."""

import asyncio

from asked import MODEL, PICTURE, QUESTION, URL, Colour, end, get_weather, see
from pydantic_ai import Agent, BinaryContent, ImageUrl, NativeOutput, PromptedOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=URL, api_key="none")
model = OpenAIChatModel(MODEL, provider=provider)
see("plain", lambda: Agent(model, instructions="Be brief.").run_sync(QUESTION).output)


async def streamed() -> object:
    async with Agent(model).run_stream(QUESTION) as result:
        return [text async for text in result.stream_text(delta=True)]


see("stream", lambda: asyncio.run(streamed()))
see("picture", lambda: Agent(model).run_sync([QUESTION, ImageUrl(PICTURE)]).output)
see("bytes", lambda: Agent(model).run_sync([QUESTION, BinaryContent.from_data_uri(PICTURE)]).output)
see("native", lambda: Agent(model, output_type=NativeOutput(Colour)).run_sync(QUESTION).output)
see("prompted", lambda: Agent(model, output_type=PromptedOutput(Colour), model_settings={"max_tokens": 32}, retries=0)
    .run_sync(QUESTION).output)  # fmt: skip
see("tool output", lambda: Agent(model, output_type=Colour).run_sync(QUESTION).output)
see("tools", lambda: Agent(model, tools=[get_weather]).run_sync(QUESTION).output)
see("no such model", lambda: Agent(OpenAIChatModel("gpt-4o", provider=provider)).run_sync(QUESTION).output)
end("pydantic-ai-slim")
