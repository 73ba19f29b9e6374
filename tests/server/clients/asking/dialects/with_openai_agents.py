"""The OpenAI Agents SDK: runs with a tool that returns a picture, whole and streamed."""

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    ToolOutputImage,
    function_tool,
    set_tracing_disabled,
)
from asked import END, MODEL, PICTURE, QUESTION, Colour, end, see
from openai import AsyncOpenAI

set_tracing_disabled(True)


def model(name: str = MODEL) -> OpenAIResponsesModel:
    return OpenAIResponsesModel(name, AsyncOpenAI(max_retries=0))


@function_tool
def look() -> ToolOutputImage:
    """Return a picture of the thing."""
    return ToolOutputImage(image_url=PICTURE)


shown = [{"role": "user", "content": [
    {"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
]}]  # fmt: skip


def looker(**fields: object) -> Agent:
    ending = {"seed": 3, "min_tokens": 4, "logit_bias": {END: 100}}  # a toy with random weights hardly ends by itself
    settings = ModelSettings(tool_choice="required", max_tokens=160, extra_body=ending, **fields)
    return Agent("Looker", instructions="Look, then answer.", model=model(), tools=[look], model_settings=settings)


async def streamed(agent: Agent, asked: object) -> object:
    result = Runner.run_streamed(agent, asked)
    kinds = [event.type async for event in result.stream_events()]
    return len(kinds), result.final_output, [type(item).__name__ for item in result.new_items]


def run(agent: Agent, asked: object, **fields: object) -> object:
    return asyncio.run(Runner.run(agent, asked, **fields))


see("plain", lambda: run(Agent("Plain", model=model()), QUESTION).final_output)
see("stream", lambda: asyncio.run(streamed(Agent("Plain", model=model()), QUESTION)))
see("picture", lambda: run(Agent("Plain", model=model()), shown).final_output)
see("schema", lambda: run(Agent("Typed", model=model(), output_type=Colour), shown).final_output)
see("tool with a picture", lambda: [type(item).__name__ for item in run(looker(), QUESTION).new_items])
see("tool with a picture, streamed", lambda: asyncio.run(streamed(looker(), QUESTION)))
see(
    "tool, in the server's chain",
    lambda: run(looker(store=True), QUESTION, auto_previous_response_id=True).final_output,
)
see("no such model", lambda: run(Agent("Other", model=model("gpt-4o")), QUESTION))
end("openai-agents")
