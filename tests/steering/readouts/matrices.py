"""Diagnostics computed from whole attention matrices of the plain model, and chats to ask for them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from steering import (
    MLLM,
    Choice,
    Sampling,
    Steer,
    SteeringVector,
)  # fmt: skip
from steering.prompt.layout import Layout
from steering.prompt.spans import CONTEXT, QUESTION
from tests.steering.chats import image, text
from tests.steering.plain import Addition, Answer, Messages

STEPS = 3
TOLERANCE = 1e-5


def chats() -> list[Messages]:
    """Return chats of many layouts.

    They have one and three images, context by line and by span, system prompt, texts between images, an earlier turn.
    """
    system = {"role": "system", "content": [text("You are a helpful assistant.")]}
    return [
        [system, {"role": "user", "content": [image(0), text("Text context: the shop is closed.\nIs it open?")]}],
        [
            {
                "role": "user",
                "content": [
                    *(image(1), text("The first."), image(2), text("There are three people.", span="context")),
                    *(image(0), text("How many people are in the second image? " * 3)),
                ],
            }
        ],
        [
            system,
            {"role": "user", "content": [image(3), text("What is this?")]},
            {"role": "assistant", "content": [text("A chair.")]},
            {"role": "user", "content": [text("Are you sure?")]},
        ],
    ]


def rows_behind(answer: Answer, layout: Layout, columns: list[int]) -> tuple[list[int], dict[str, int]]:
    """Return the query rows of an average over `columns`, and the number of each kind."""
    n = answer.prompt_length
    question = [row for row in layout.columns(QUESTION).tolist() if all(row > column for column in columns)]
    generated = list(range(n, answer.attention.shape[1]))
    rows = question + generated or [n - 1]
    return rows, {"question": len(question), "output": len(generated), "last": int(rows == [n - 1])}


def expected(answer: Answer, layout: Layout, spans: str = "whole") -> dict[str, Any]:
    """sigma, attention ratio and decay, from their definitions, on whole matrices."""
    n = answer.prompt_length
    vision = torch.cat([picture.columns for picture in layout.images])
    context = layout.columns(CONTEXT)
    rows, counts = rows_behind(answer, layout, vision.tolist())
    attention = answer.attention[:, rows]  # (layers, rows, columns)
    sigma = torch.stack([attention[:, :, picture.columns].mean((1, 2)) for picture in layout.images], dim=1)
    out: dict[str, Any] = {"sigma": sigma, "rows": counts, "ratio": None, "by_layer": None}
    rows, out["ratio_rows"] = rows_behind(answer, layout, [*vision.tolist(), *context.tolist()])
    if len(context):
        attention = answer.attention[:, rows]
        one, other = attention[:, :, vision].mean((1, 2)), attention[:, :, context].mean((1, 2))
        out["by_layer"] = one / (one + other)
        out["ratio"] = one.mean() / (one.mean() + other.mean())
    attention = answer.attention[:, rows]
    out["image_share"] = attention[:, :, vision].sum(2).mean()
    out["context_share"] = attention[:, :, context].sum(2).mean() if len(context) else None
    if spans == "whole":
        pictured = set(vision.tolist())
        system = torch.arange(min(pictured))
        user = torch.tensor([place for place in range(min(pictured), n) if place not in pictured])
    else:
        system, user = (part.nonzero()[:, 0] for part in layout.texts.unbind(1))
    steps = answer.attention[:, n - 1 :]
    parts = torch.stack([steps[:, :, part].sum(-1) for part in (vision, system, user)], dim=-1)
    out["decay_layers"] = parts / parts.sum(-1, keepdim=True)  # (layers, steps, 3)
    out["decay"] = out["decay_layers"].nanmean(0)
    return out


def numbers(values: Any) -> torch.Tensor:
    """Convert a list, with None for NaN."""
    return torch.tensor([torch.nan if value is None else value for value in values])


def assert_diagnostics(choice: Choice, answer: Answer, layout: Layout) -> None:
    assert list(choice.token_ids) == answer.tokens
    got = choice.diagnostics
    assert got is not None
    wanted = expected(answer, layout, got["decay"]["spans"])

    def close(one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE, equal_nan=True)

    close(torch.tensor(got["focus"]["sigma"]), wanted["sigma"])
    assert got["modality"]["rows"] == wanted["ratio_rows"]
    for name in ("image_share", "context_share"):
        assert got["modality"][name] == (
            None if wanted[name] is None else pytest.approx(float(wanted[name]), abs=TOLERANCE)
        )
    if wanted["ratio"] is None:
        nothing = {"attention_ratio": None, "by_layer": None, "reason": "no_context"}
        assert got["modality"] | nothing == got["modality"]
    else:
        assert got["modality"]["reason"] is None
        close(numbers(got["modality"]["by_layer"]), wanted["by_layer"])
        assert got["modality"]["attention_ratio"] == pytest.approx(float(wanted["ratio"]), abs=TOLERANCE)
    close(torch.stack([numbers(got["decay"][name]) for name in ("vision", "system", "user")], dim=1), wanted["decay"])
    vision = wanted["decay"][:, 0]
    if len(vision) > 1:
        line = np.polyfit(np.arange(len(vision)), vision.numpy(), 1)
        assert got["decay"]["slope"] == pytest.approx(float(line[0]), abs=TOLERANCE)
    assert got["rows"] == wanted["rows"]
    for number, (told, span) in enumerate(zip(got["images"], layout.images, strict=True), start=1):
        assert (told["image"], told["tokens"]) == (number, len(span.columns))
        assert span.grid is None or told["grid"] == list(span.grid)  # tiles: see test_tiles
    json.dumps(got, allow_nan=False)


def vector(mllm: MLLM) -> SteeringVector:
    generator = torch.Generator().manual_seed(5)
    layers = mllm.num_layers
    direction = torch.randn(layers, mllm.hidden_size, generator=generator)
    ones = torch.ones(layers)
    return SteeringVector("test", direction, 0.5 * ones, ones, ones, (0, 1), mllm.fingerprint)


def steered(mllm: MLLM) -> tuple[Steer, Addition]:
    """Return the same push for the engine and for the plain model."""
    made = vector(mllm)
    delta = torch.zeros_like(made.direction)
    delta[:2] = -0.8 * 0.5 * made.direction[:2]
    return Steer(made, -0.8), (delta, "all")


SAMPLING = Sampling(max_tokens=STEPS, ignore_eos=True)


def layout_span(layout: Layout, kind: str) -> list[int]:
    """Return the columns of one of the three parts of the prompt."""
    pictures = layout.image_columns.tolist()
    before = [place for place in range(len(layout.spans)) if place < min(pictures)]
    behind = [place for place in range(min(pictures), len(layout.spans)) if place not in pictures]
    return {"vision": pictures, "system": before, "user": behind}[kind]
