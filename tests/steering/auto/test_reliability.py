"""Probabilities of answers with less of the prompt, against plain transformers on whole sequences."""

from __future__ import annotations

import math
from typing import Any

import pytest
from PIL import Image

from steering import Auto, Request, RequestError, Sampling, decide, measure
from steering.auto import reliability
from steering.auto.reliability import TOKENS, Reliability
from steering.prompt.chat import without_context, without_images
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.pushes import unit_vector
from tests.steering.plain import Plain, uncached


def part(text: str, **more: str) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def chats() -> list[Any]:
    """Return chats with a context by line and one by span, with one and two images."""
    image = [{"type": "image", "image": families.example_image(i)} for i in range(2)]
    by_line = [{"role": "user", "content": [image[0], part("Text context: the ball is red.\nWhat is the ball?")]}]
    by_span = [{"role": "user", "content": [*image, part("The dog sleeps.", span="context"), part("What does it do?")]}]
    return [by_line, by_span]


def bare() -> list[tuple[Any, Any]]:
    """Return the chats without images and without contexts, written by hand."""
    image = [{"type": "image", "image": families.example_image(i)} for i in range(2)]
    return [
        (
            [{"role": "user", "content": [part("Text context: the ball is red.\nWhat is the ball?")]}],
            [{"role": "user", "content": [image[0], part("What is the ball?")]}],
        ),
        (
            [{"role": "user", "content": [part("The dog sleeps."), part("What does it do?")]}],
            [{"role": "user", "content": [*image, part("What does it do?")]}],
        ),
    ]


def probability(plain: Plain, chat: Any, tokens: tuple[int, ...]) -> float:
    inputs = plain.inputs(chat)
    rows = (
        uncached(plain.model, inputs, tokens).logits[0, inputs["input_ids"].shape[1] - 1 : -1].float().log_softmax(-1)
    )
    return math.exp(sum(float(row[token]) for row, token in zip(rows, tokens, strict=True)))


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3", "glm4v", "internvl"])
def test_drops_equal_those_of_the_plain_model(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are shorter than `TOKENS`; the next test has full length."""
    monkeypatch.setattr(reliability, "TOKENS", 8)
    engine, plain = make_engine(family), load_plain(family)
    cases_given = list(zip(chats(), bare(), strict=True))[0 if family == "qwen2_vl" else 1 :]
    measured = measure(engine, [chat for chat, _ in cases_given])
    answers = engine.generate([Request(chat, Sampling(max_tokens=8)) for chat, _ in cases_given])
    for drops, (chat, less), answer in zip(measured, cases_given, answers, strict=True):
        tokens = answer.choices[0].token_ids
        assert len(tokens) == 8  # so that none of them ends the answer
        expected = [probability(plain, chat_or_less, tokens) for chat_or_less in (chat, *less)]
        assert (drops.answer, drops.without_images, drops.without_context) == pytest.approx(
            expected, rel=1e-2, abs=1e-12
        )


def test_a_model_that_needs_images_is_shown_gray_ones(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain, chat = make_engine("paligemma"), load_plain("paligemma"), chats()[0]
    (reliability,) = measure(engine, [chat])
    (answer,) = engine.generate([Request(chat, Sampling(max_tokens=TOKENS))])
    picture, text = chat[0]["content"]
    gray = {"type": "image", "image": Image.new("RGB", picture["image"].size, (128, 128, 128))}
    tokens = answer.choices[0].token_ids
    assert len(tokens) == TOKENS
    expected = probability(plain, [{"role": "user", "content": [gray, text]}], tokens)
    assert reliability.without_images == pytest.approx(expected, rel=1e-2, abs=1e-12)
    assert reliability.without_images != reliability.answer


def test_forced_tokens_are_scored(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain, chat = make_engine("qwen2_vl"), load_plain("qwen2_vl"), chats()[0]
    tokens = (5, 9, 7, 11)
    sampling = Sampling(max_tokens=4, ignore_eos=True, logprobs=1, temperature=1.0, seed=1)
    free = Request(chats()[1], sampling)
    forced, free_result = engine.generate([Request(chat, sampling, forced=tokens), free])
    (alone,) = engine.generate([free])
    assert forced.choices[0].token_ids == tokens
    assert free_result.choices[0].token_ids == alone.choices[0].token_ids
    total = sum(token.logprob for token in forced.choices[0].logprobs or ())
    assert math.exp(total) == pytest.approx(probability(plain, chat, tokens), rel=1e-3)


def test_the_larger_drop_wins() -> None:
    assert Reliability(0.9, 0.1, 0.8).toward == "vision"
    assert Reliability(0.9, 0.8, 0.1).toward == "text"
    assert Reliability(0.9, 0.2, 0.5).report() == {
        "criterion": "drop", "answer": 0.9, "without_images": 0.2, "without_context": 0.5,
        "drop_vision": pytest.approx(0.7), "drop_text": pytest.approx(0.4), "abstained": None,
    }  # fmt: skip


def test_an_answer_that_depends_on_neither_modality_is_not_steered(make_engine: MakeEngine) -> None:
    assert Reliability(0.9, 0.82, 0.85).undecided
    assert Reliability(0.9, 0.95, 0.99).undecided
    assert not Reliability(0.9, 0.80, 0.95).undecided
    assert not Reliability(0.9, 0.95, 0.80).undecided
    assert not Reliability(1e-9, 0.8e-9, 0.95e-9).undecided  # a long answer is improbable as a whole
    vector = unit_vector(make_engine("qwen2_vl").mllm)
    abstained = Auto(vector, 0.5, (2,), "prompt").steer(Reliability(0.9, 0.82, 0.85))
    assert (abstained.scale, abstained.toward, abstained.layers, abstained.tokens) == (0, None, (2,), "prompt")
    assert abstained.auto is not None
    assert "stands without either modality" in abstained.auto["abstained"]
    assert Auto(vector, 0.5).steer(Reliability(0.9, 0.1, 0.85)).scale == -0.5
    assert Auto(vector, 0.5).steer(Reliability(0.9, 0.85, 0.1)).scale == 0.5


def test_a_request_is_steered_by_reliability_and_reports_it(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector = unit_vector(engine.mllm)
    auto = Auto(vector, 0.5, tokens="prompt")
    decided = decide(engine, Request(chats()[0], Sampling(max_tokens=3, ignore_eos=True), auto))
    (reliability,) = measure(engine, [chats()[0]])
    (steer,) = decided.asked["steering"].steers
    assert not reliability.undecided
    assert (steer.toward, steer.tokens, abs(steer.scale)) == (reliability.toward, "prompt", 0.5)
    (choice,) = engine.generate([decided])[0].choices
    assert choice.applied is not None
    assert choice.applied["steering"][0]["auto"] == pytest.approx(reliability.report())


def test_without_an_image_or_a_context_there_is_nothing_to_weigh(make_engine: MakeEngine) -> None:
    for chat in (without_images(chats()[0]), without_context(chats()[1])):
        with pytest.raises(RequestError, match="needs an image and a text context") as refused:
            measure(make_engine("qwen2_vl"), [chat])
        assert refused.value.param == "steering.toward"


def test_a_chat_is_reduced_to_one_modality() -> None:
    for chat, (unseen, unread) in zip(chats(), bare(), strict=True):
        assert [[{k: v for k, v in p.items() if k != "span"} for p in m["content"]] for m in without_images(chat)] == [
            m["content"] for m in unseen
        ]
        assert [[p.get("text") for p in m["content"]] for m in without_context(chat)] == [
            [p.get("text") for p in m["content"]] for m in unread
        ]
    string = [
        {"role": "user", "content": "Text context: no.\nWell?"},
        {"role": "assistant", "content": "Text context: x"},
    ]
    assert [message["content"] for message in without_context(string)] == ["Well?", "Text context: x"]
    assert without_images(string) == string
