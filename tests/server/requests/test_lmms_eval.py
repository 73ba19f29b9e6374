"""Presets as lmms-eval asks for them.

Its models `openai` and `async_openai` (lmms_eval/models/chat, of version 0.7.3) send messages, model, max_tokens and
temperature with the `openai` package, and no other field.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from flask import Flask

import steering
from demo.world.conflicts import conflict_samples
from probes.conflicts.samples import ConflictSample
from server.app import create_app
from server.settings import Settings

TASK = conflict_samples(3, seed=3)[1:]
"""Conflicts that the embedded vector decides."""
NAME = "helmsight-demo"
FIELDS: dict[str, dict[str, Any]] = {"sage": {"sage": True}, "vision": {"steering": {"toward": "vision"}}}
ROUTE = "/v1/chat/completions"


@pytest.fixture(scope="module")
def app(engine: steering.Engine) -> Flask:
    """Return an application of the embedded model with its own vector, as `helmsight serve` has it."""
    return create_app(Settings(vectors=()), engine=engine)


@pytest.fixture
def url(app: Flask, live: Callable[[Flask], str]) -> str:
    return f"{live(app)}/v1"


def payload(doc: ConflictSample, model: str) -> dict[str, Any]:
    """Return a document as both models send it (`ChatMessages.to_openai_messages`), greedy where the task is silent."""
    buffer = io.BytesIO()
    doc.picture().save(buffer, format="PNG")
    picture = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    text = f"Text context: {doc.context}\n{doc.question}"
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
    return {"messages": [{"role": "user", "content": content}], "model": model, "max_tokens": 64, "temperature": 0}


@pytest.fixture(scope="module")
def explicit(app: Flask) -> dict[str, list[Any]]:
    """Return the task's choices by preset, from requests that spell out its fields."""
    client = app.test_client()
    return {
        preset: [client.post(ROUTE, json={**payload(doc, NAME), **fields}).json["choices"][0] for doc in TASK]  # type: ignore[index]
        for preset, fields in FIELDS.items()
    }


def one_by_one(url: str, model: str) -> list[Any]:
    """Return the task's choices, as `openai` asks for them one by one."""
    with openai.OpenAI(base_url=url, api_key="none") as client:
        return [client.chat.completions.create(**payload(doc, model)).choices[0] for doc in TASK]


def at_once(url: str, model: str) -> list[Any]:
    """Return the task's choices, as `async_openai` asks for them.

    This runs in a thread of its own, as Playwright keeps an event loop in the tests' thread.
    """

    async def asked() -> Sequence[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return await asyncio.gather(*(client.chat.completions.create(**payload(doc, model)) for doc in TASK))

    with ThreadPoolExecutor(1) as thread:
        return [answer.choices[0] for answer in thread.submit(lambda: asyncio.run(asked())).result()]


def done(applied: dict[str, Any]) -> Any:
    """Return the settings of the vectors and the stages that were applied.

    Numbers of stages are left out: they differ by rounding where other requests share the batch.
    """
    vectors = [(one["name"], one["scale"], one["layers"]) for one in applied.get("steering", ())]
    return vectors, {stage for stage, said in applied.get("sage", {}).items() if said is not None}


@pytest.mark.parametrize("run", [one_by_one, at_once])
@pytest.mark.parametrize("preset", FIELDS)
def test_a_preset_answers_as_the_explicit_fields_do(
    url: str, explicit: dict[str, list[Any]], run: Callable[[str, str], list[Any]], preset: str
) -> None:
    for named, other in zip(run(url, f"{NAME}@{preset}"), explicit[preset], strict=True):
        assert named.message.content == other["message"]["content"]
        applied = named.model_extra["applied"]
        assert (applied.pop("preset"), applied.pop("skipped")) == (preset, [])
        assert done(applied) == done(other["applied"]) != ([], set())


def test_a_run_of_a_harness_is_steered(url: str, explicit: dict[str, list[Any]]) -> None:
    """Answers that are equal above are not those of a model without steering."""
    told = one_by_one(url, f"{NAME}@text")
    for doc, seen, said in zip(TASK, explicit["vision"], told, strict=True):
        assert doc.answer_vision in seen["message"]["content"]
        assert doc.answer_text in said.message.content
