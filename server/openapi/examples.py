"""Example requests that can be sent unchanged to a server with the embedded model."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from server.openapi.operation import Example
from steering.protocol.forms import forms

CONTEXT = "The green object is a heart."
QUESTION = "What is the green object?"

CHOICE = {
    "type": "object",
    "properties": {"shape": {"enum": ["heart", "ring", "star"]}},
    "required": ["shape"],
    "additionalProperties": False,
}


@cache
def picture() -> str:
    """Return a scene of the embedded model's world as a data: URI."""
    data = (Path(__file__).parent / "scene.png").read_bytes()
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """Return a chat about the scene."""
    image = {"type": "image_url", "image_url": {"url": picture()}}
    parts = [{"type": "text", "text": text} for text in texts[:-1]]
    marked = [{**part, "span": "context"} for part in parts]
    return {
        "messages": [{"role": "user", "content": [image, *marked, {"type": "text", "text": texts[-1]}]}],
        "max_tokens": 16,
        **fields,
    }


def of_chat() -> Mapping[str, Example]:
    """Return examples of chats with OpenAI's fields, with Helmsight's own, and with every registered intervention."""
    each = {
        name: Example(f"With {name} and its default options", chat(QUESTION, **{name: form.example}))
        for name, form in forms().items()
    }
    vectors = [{"name": "modality-preference", "scale": -0.5, "apply": {"tokens": "image:1"}}]
    return {
        "picture": Example("A question about an image", chat(QUESTION)),
        "stream": Example("The same as a stream", chat(QUESTION, stream=True, stream_options={"include_usage": True})),
        "text": Example(
            "OpenAI's fields",
            {
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What can you see?"}],
                "n": 2, "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 1, "stop": ["\n"],
                "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -1}, "metadata": {"user": "ann"},
            },
        ),
        "steering": Example(
            "Steered toward the text, beside the plain answer",
            chat(CONTEXT, QUESTION, steering={"toward": "text", "strength": 1.0}, baseline=True),
        ),
        "auto": Example(
            "Steered toward the modality that the answer relies on", chat(CONTEXT, QUESTION, steering={"toward": "auto"})
        ),
        "vectors": Example("Steered along a named vector", chat(QUESTION, steering={"vectors": vectors})),
        "preset": Example(
            "With the name of a preset, for clients that cannot send further fields",
            chat(QUESTION, model="helmsight-demo@sage"),
        ),
        "lenient": Example(
            "Interventions that need an image are skipped without one",
            {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "sage": True, "strict": False},
        ),
        "json": Example(
            "Answered according to a JSON schema",
            chat(
                QUESTION,
                max_tokens=40,
                response_format={"type": "json_schema", "json_schema": {"name": "choice", "schema": CHOICE}},
            ),
        ),
        "diagnostics": Example(
            "With readouts of where the model looked",
            chat(QUESTION, diagnostics={"include": ["focus", "patches"], "layers": {"last": 2}, "target_image": 1}),
        ),
        **each,
    }  # fmt: skip


def of_responses() -> Mapping[str, Example]:
    """Return examples of responses."""
    parts = [{"type": "input_image", "image_url": picture()}, {"type": "input_text", "text": QUESTION}]
    request = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
    return {
        "picture": Example("A question about an image", request),
        "text": Example(
            "A text alone", {"instructions": "Be brief.", "input": "What can you see?", "max_output_tokens": 8}
        ),
        "stream": Example("As a stream, steered", {**request, "stream": True, "steering": {"toward": "vision"}}),
    }


def of_messages() -> Mapping[str, Example]:
    """Return examples of Anthropic's messages."""
    kind, _, data = picture().removeprefix("data:").partition(";base64,")
    image = {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}
    request = {"messages": [{"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}], "max_tokens": 16}
    return {
        "picture": Example("A question about an image", request),
        "stream": Example(
            "As a stream, with readouts", {**request, "stream": True, "diagnostics": {"include": ["focus"]}}
        ),
    }


def of_count() -> Mapping[str, Example]:
    """Return examples of chats to count."""
    return {"text": Example("A text alone", {"messages": [{"role": "user", "content": QUESTION}]})}


def of_change() -> Mapping[str, Example]:
    """Return examples of a change of a stored answer."""
    return {"right": Example("The answer turned out to be right", {"metadata": {"answer_correct": "true"}})}


def of_dry_run() -> Mapping[str, Example]:
    """Return examples of a dry run."""
    return {
        "strength": Example("The effect of a strength of 2", {"steering": {"strength": 2}}),
        "auto": Example("With an automatic direction", {"steering": {"toward": "auto"}}),
        "whole": Example("A whole request", chat(QUESTION, sage=True, diagnostics={"target_image": 1})),
    }
