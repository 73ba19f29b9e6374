"""Tests, by hiding pictures, if the picture that attention focuses on is the one that an answer rests on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from PIL import Image
from torch import Tensor

from demo.evaluation.answering import DemoPrompt, PlainModel
from demo.evaluation.evaluate import held_out_questions
from probes.harness.bootstrap import wilson
from steering.readouts.focus import METRICS

PICTURES = 3
KINDS = ("background",)
"""Kinds of questions that every watched organism can answer."""
FEWEST = 10
GRAY = (130, 130, 130)


@dataclass(frozen=True)
class RightAnswer:
    """A question to one of several pictures that was answered rightly.

    It has the picture asked about (from 0), and the image-attention factor (layers, images).
    """

    prompt: DemoPrompt
    answer: str
    target: int
    sigma: Tensor


Metric = Callable[[Tensor], int]
"""A function from factors (layers, images) to the focused picture (from 0)."""


def attention(model: PlainModel, count: int, seed: int) -> dict[str, Any] | None:
    """Measure attention accuracy, and how many answers change where the focused or another picture is hidden.

    Attention accuracy is the share of questions whose focused picture is the one asked about
    (implicit-visual-misunderstanding paper, section 3). The metric is the best of all on the first half of the right
    answers; the second half is measured. None for a model that gives hardly any.
    """
    right = right_answers(model, count, seed)
    half = len(right) // 2
    if half < FEWEST:
        return None
    name, metric = best_metric(right[:half])
    measured = right[half:]
    focused = [metric(answer.sigma) for answer in measured]
    rng = random.Random(f"hidden {seed}")
    unfocused = [rng.choice([k for k in range(PICTURES) if k != focus]) for focus in focused]
    wrong = [i for i, answer in enumerate(measured) if focused[i] != answer.target]
    implicit = [measured[i] for i in wrong]
    return {
        "pictures": PICTURES,
        "answered": share(len(right), count),
        "metric": name,
        "attention_accuracy": share(len(measured) - len(wrong), len(measured)),
        "changed": {"focused": changed(model, measured, focused), "another": changed(model, measured, unfocused)},
        "changed_where_wrong": {
            "focused": changed(model, implicit, [focused[i] for i in wrong]),
            "asked about": changed(model, implicit, [answer.target for answer in implicit]),
        }
        if wrong
        else None,
    }


def right_answers(model: PlainModel, count: int, seed: int) -> list[RightAnswer]:
    """Return those of `count` held-out questions that the model answers rightly."""
    prompts, gold, targets = held_out_questions(f"hidden pictures {PICTURES}", KINDS, PICTURES, count, seed)
    answers = [answer.strip() for answer in model(prompts)]
    right = [i for i, expected in enumerate(gold) if answers[i] == expected]
    sigma = model.image_attention([prompts[i] for i in right], [answers[i] for i in right])
    return [RightAnswer(prompts[i], answers[i], targets[i], sums) for i, sums in zip(right, sigma, strict=True)]


def best_metric(answers: Sequence[RightAnswer]) -> tuple[str, Metric]:
    """Return the metric that finds most of the pictures asked about.

    The candidates are the paper's three metrics over each number of last layers.
    """

    def metric(name: str, last: int) -> Metric:
        return lambda sigma: METRICS[name](sigma[-last:]) or 0

    tried = {
        f"{name.upper().replace('_', '-')}-{last}": metric(name, last)
        for last, name in product(range(1, len(answers[0].sigma) + 1), METRICS)
    }
    best = max(tried, key=lambda name: sum(tried[name](answer.sigma) == answer.target for answer in answers))
    return best, tried[best]


def hidden(prompt: DemoPrompt, index: int) -> DemoPrompt:
    """Return the same prompt with one of its pictures gray all over."""
    gray = Image.new("RGB", prompt.images[index].size, GRAY)
    return DemoPrompt([gray if k == index else image for k, image in enumerate(prompt.images)], prompt.messages)


def changed(model: PlainModel, answers: Sequence[RightAnswer], hidden_images: Sequence[int]) -> dict[str, Any]:
    """Return how many answers change where these pictures are hidden."""
    again = model([hidden(answer.prompt, k) for answer, k in zip(answers, hidden_images, strict=True)])
    return share(sum(a.strip() != answer.answer for a, answer in zip(again, answers, strict=True)), len(answers))


def share(counted: int, of: int) -> dict[str, Any]:
    """Return a share with Wilson's 95 % interval and its total."""
    return {"value": counted / of, "value_95": list(wilson(counted, of)), "n": of}
