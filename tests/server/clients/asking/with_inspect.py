"""Inspect's provider for OpenAI-compatible servers: a task of two samples, structured output, tools."""

import asyncio
import os
import tempfile

os.environ["HELMSIGHT_BASE_URL"] = os.environ["OPENAI_BASE_URL"]
os.environ["HELMSIGHT_API_KEY"] = "none"
from asked import MODEL, PICTURE, QUESTION, Colour, end, see
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ContentImage, ContentText, GenerateConfig, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import json_schema

NAME = f"openai-api/helmsight/{MODEL}"
shown = [ChatMessageUser(content=[ContentText(text=QUESTION), ContentImage(image=PICTURE)])]


def run() -> object:
    with tempfile.TemporaryDirectory() as logs:
        task = Task(
            [Sample(input=QUESTION, target="red"), Sample(input=shown, target="red")],
            solver=generate(),
            scorer=includes(),
        )
        log = eval(task, model=NAME, log_dir=logs, display="none", max_retries=0)[0]
        return log.status, log.error


def ask(name: str = NAME, tools: tuple = (), **fields: object) -> object:
    config = GenerateConfig(max_retries=0, **fields)
    return asyncio.run(get_model(name, config=config, memoize=False).generate(shown, tools=list(tools))).completion


see("task", run)
see("schema", lambda: ask(response_schema=ResponseSchema(name="colour", json_schema=json_schema(Colour))))
see("tools", lambda: ask(tools=[ToolInfo(name="get_weather", description="The weather.", parameters=ToolParams())]))
see(
    "sampled",
    lambda: ask(temperature=0.5, top_p=0.9, seed=1, max_tokens=8, stop_seqs=["\n"], num_choices=2, logprobs=True),
)
see("no such model", lambda: ask("openai-api/helmsight/gpt-4o"))
end("inspect_ai")
