"""Side effects of steering where nothing conflicts: KL against plain transformers, repetition by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from probes.answering.base import Chat, Push, Question
from probes.vector.neutral import DESCRIBE, MAX_TOKENS, chats, repetition, repetitions, shift
from steering import Choice, Request, Result, Steer, SteeringVector
from steering.recorders.prompt_state import PromptState
from tests import families
from tests.probes.conftest import Scripted, make_samples, text_of
from tests.steering.plain import Plain


def test_every_picture_is_asked_about_and_described_without_context_or_options() -> None:
    samples = make_samples(2, question="What is it?")
    asked = chats(samples)
    assert [[part.get("text") for part in chat[0]["content"]] for chat in asked] == [
        [None, "What is it?"], [None, DESCRIBE], [None, "What is it?"], [None, DESCRIBE],
    ]  # fmt: skip
    assert [chat[0]["content"][0]["image"] for chat in asked] == [
        samples[0].picture(), samples[0].picture(), samples[1].picture(), samples[1].picture(),
    ]  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- shift


def _vector(engine: steering.Engine) -> SteeringVector:
    """Small pushes, so that the distributions overlap."""
    count, width = engine.mllm.num_layers, engine.mllm.hidden_size
    direction = torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(count)
    return SteeringVector("v", direction, 0.2 * ones, ones.clone(), ones.clone(), (1,), engine.mllm.fingerprint)


def _kl(plain: Plain, chat: Chat, deltas: list[torch.Tensor]) -> list[float]:
    """KL(unsteered || steered) by each, in float64 from runs of plain transformers."""
    without = plain.answer(list(chat), 1).logits[0].double().log_softmax(-1)
    steered = [plain.answer(list(chat), 1, add=[(one, "all")]).logits[0].double().log_softmax(-1) for one in deltas]
    return [float((without.exp() * (without - one)).sum()) for one in steered]


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_shift_is_the_divergence_of_plain_transformers_with_the_vector_added(root: Path, family: str) -> None:
    folder = families.checkpoint(family, root)
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=3, max_length=512)
    vector, plain, asked = _vector(engine), Plain(folder), chats(make_samples(2))
    steers = [
        Steer.to(vector, "text", 1.0), Steer.to(vector, "vision", 1.0), Steer.to(vector, "text", 0.5, layers=(0,)),
        Steer.to(vector, "vision", 2.0, layers=(0, 2)),
    ]  # fmt: skip
    by_chat = [_kl(plain, chat, [steer.delta for steer in steers]) for chat in asked]
    expected = [sum(values) / len(asked) for values in zip(*by_chat, strict=True)]
    found = shift(engine, asked, steers, quiet=True)
    assert found == pytest.approx(expected, rel=1e-3)
    assert len({round(value, 4) for value in found}) == 4
    assert min(found) > 1e-3


def test_a_strength_of_zero_shifts_nothing(tiny: steering.Engine, vector: SteeringVector) -> None:
    steers = [Steer.to(vector, "text", 0.0), Steer.to(vector, "text", 0.3), Steer.to(vector, "vision", 0.0)]
    first, some, last = shift(tiny, chats(make_samples(1)), steers, quiet=True)
    assert [first, last] == pytest.approx([0.0, 0.0], abs=1e-9)
    assert some > 1e-3


class Saying:
    """An engine that gives these distributions of the next token, one a request."""

    def __init__(self, *probabilities: list[float]) -> None:
        self._rows = [torch.tensor(row).log() for row in probabilities]

    def stream(self, requests: Iterable[Request]) -> Iterator[Result]:
        for request, row in zip(requests, self._rows, strict=True):
            assert request.states
            yield Result(
                (Choice(0, "", (), "length", measured={"prompt_state": PromptState(next_logprobs=row)}),), 1, 1
            )


def test_shift_by_hand(vector: SteeringVector) -> None:
    steers = [Steer.to(vector, "vision"), Steer.to(vector, "text")]
    engine: Any = Saying([0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [0.9, 0.1], [0.9, 0.1], [0.1, 0.9])
    found = shift(engine, chats(make_samples(1)), steers, quiet=True)
    vision = (0.5 * math.log(2) + 0.5 * math.log(2 / 3)) / 2
    assert found == pytest.approx([vision, 0.8 * math.log(9) / 2], rel=1e-6)


def test_a_token_without_any_probability_adds_nothing(vector: SteeringVector) -> None:
    engine: Any = Saying([0.5, 0.5, 0.0, 0.0], [0.25, 0.7, 0.0, 0.05])
    found = shift(engine, chats(make_samples(1))[:1], [Steer.to(vector, "text")], quiet=True)
    assert found == pytest.approx([0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.7)], rel=1e-6)


def test_a_push_far_beyond_any_dose_shifts_by_a_number(tiny: steering.Engine, vector: SteeringVector) -> None:
    steers = [Steer.to(vector, "text", strength) for strength in (1e4, 1e9)]
    found = shift(tiny, chats(make_samples(1)), steers, quiet=True)
    assert all(math.isfinite(value) and value > 1 for value in found)


def test_without_steering_or_chats_there_is_no_shift(tiny: steering.Engine, vector: SteeringVector) -> None:
    assert shift(tiny, chats(make_samples(1)), [], quiet=True) == []
    assert shift(tiny, [], [Steer.to(vector, "text")], quiet=True) == [0.0]


# --------------------------------------------------------------------------------------------------------- repetition


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("no no no", 0.0),  # no run of four
        ("one two three four", 0.0),
        ("a b c d a b c d", 1 / 5),  # abcd bcda cdab dabc abcd
        ("no " * 10, 6 / 7),
        ("No no NO no no", 1 / 2),
        ("the ball, the ball, the ball", 2 / 5),  # words: the ball , the ball , the ball; runs of tb,t b,tb ,tb, twice
        ("the ball is red. The ball is blue.", 0.0),  # "the ball is" is a run of three
        ("the ball is red. The ball is red.", 2 / 7),  # "the ball is red" and "ball is red ."
        ("a b c d e f g h", 0.0),
        ("äh äh äh äh äh", 1 / 2),
        ("\n a\tb  c d\na b c d ", 1 / 5),
    ],
)
def test_repetition_by_hand(text: str, expected: float) -> None:
    assert repetition(text) == pytest.approx(expected)


def test_every_push_has_the_mean_of_its_own_answers() -> None:
    """The number of repeated words differs by push and by chat."""
    asked = chats(make_samples(3, question="What is it?"))
    pushes = [None, Push("vision", "v", 1.0), Push("text", "v", 2.0)]

    def answer(question: Question) -> str:
        words = 4 + (0 if question.push is None else 2 * int(question.push.strength))
        return "go " * (words + (text_of(question) == DESCRIBE and question.push is not None))

    answerer = Scripted(answer, ahead=4)
    found = repetitions(answerer, asked, pushes, quiet=True)
    # Of w times the same word all but one of the w - 3 runs occurred before.
    assert found == pytest.approx([0.0, (2 / 3 + 3 / 4) / 2, (4 / 5 + 5 / 6) / 2])
    assert len(answerer.asked) == 18
    assert {question.max_tokens for question in answerer.asked} == {MAX_TOKENS}
    for push in pushes:
        assert [question.chat for question in answerer.asked if question.push == push] == asked


def test_without_chats_nothing_repeats() -> None:
    assert repetitions(Scripted(lambda question: "no " * 9), [], [None, None], quiet=True) == [0.0, 0.0]
