"""Answers of an engine in this process, compared with the engine asked by hand and with plain transformers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from PIL import Image

import steering
from probes.answering import engine as answering
from probes.answering.base import Chat, Push, Question, Reply
from probes.answering.engine import InProcess
from probes.conflicts.samples import messages
from probes.harness.options import ModelOptions
from steering import (
    DROP,
    Auto,
    Criterion,
    Diagnose,
    Engine,
    Generate,
    Icd,
    Options,
    Reliability,
    Request,
    Sage,
    Sampling,
    See,
    Steer,
    SteeringVector,
)  # fmt: skip
from steering.interventions.published.vista import Vista
from steering.model.calibration import Calibration
from tests import families
from tests.probes.conftest import make_samples
from tests.steering.plain import Plain

TOKENS = 4


def chats(count: int) -> list[Chat]:
    """Return chats of different lengths, so that the batch needs padding."""
    samples = [replace(one, context=one.context + " Really." * (i % 9)) for i, one in enumerate(make_samples(count))]
    return [messages(sample, ("plain", "text", "vision")[i % 3], i % 2 == 1) for i, sample in enumerate(samples)]


def alone(engine: Engine, chat: Chat, steers: tuple[Steer, ...] = (), tokens: int = TOKENS) -> Reply:
    """Return the engine's reply to that chat, asked by hand and alone."""
    request = Request(chat, Sampling(max_tokens=tokens), steers, diagnose=Diagnose(frozenset({"modality"})))
    choice = engine.generate([request])[0].choices[0]
    assert choice.diagnostics is not None
    return Reply(choice.text, choice.diagnostics)


def same(replies: Sequence[Reply], expected: Sequence[Reply]) -> None:
    assert [one.text for one in replies] == [one.text for one in expected]
    for one, other in zip(replies, expected, strict=True):
        assert one.attention_ratio == pytest.approx(other.attention_ratio, rel=1e-4)


def test_an_answer_is_what_the_engine_generates(tiny: Engine) -> None:
    asked = chats(9)
    lengths = [1 + i % 5 for i in range(9)]
    replies = list(InProcess(tiny).answers(Question(*one) for one in zip(asked, [None] * 9, lengths, strict=True)))
    same(replies, [alone(tiny, chat, tokens=length) for chat, length in zip(asked, lengths, strict=True)])
    assert len({one.text for one in replies}) > 4
    assert all(one.auto is None for one in replies)


def test_a_steered_answer_is_that_of_plain_transformers_with_the_vector_added(
    root: Path, tiny: Engine, vector: SteeringVector
) -> None:
    plain = Plain(families.checkpoint("qwen2_vl", root))
    asked = chats(4)
    pushes = [None, Push("text", vector, 0.4), Push("vision", vector, 0.3), Push("text", vector, 0.2, (0, 2))]
    deltas = [vector.delta(0), vector.delta(0.4), vector.delta(-0.3), vector.delta(0.2, [0, 2])]
    replies = InProcess(tiny).answers(Question(chat, push, TOKENS) for chat in asked for push in pushes)
    for chat in asked:
        said = [
            plain.tokenizer.decode(plain.answer(list(chat), TOKENS, add=[(delta, "all")]).tokens) for delta in deltas
        ]
        assert [next(replies).text for _ in pushes] == said
        assert len(set(said)) > 1
    assert next(replies, None) is None


def test_a_push_is_the_engines_steering(tiny: Engine, vector: SteeringVector) -> None:
    chat = chats(1)[0]
    pushes = [
        Push(side, vector, strength, layers)
        for side in ("vision", "text") for strength in (0.0, 0.2, 1.0) for layers in (None, (0,), (1, 2))
    ]  # fmt: skip
    replies = list(InProcess(tiny).answers(Question(chat, push, TOKENS) for push in pushes))
    same(
        replies,
        [
            alone(tiny, chat, (Steer.to(vector, push.toward, push.strength, layers=push.layers),))
            for push in pushes
        ],
    )  # fmt: skip
    assert len({one.attention_ratio for one in replies}) > 10


def test_the_attention_ratio_is_missing_where_there_is_no_context(tiny: Engine) -> None:
    sample = make_samples(1)[0]
    asked = [messages(sample, setting, False) for setting in ("plain", "image_only", "context_only")]
    both, image, context = (one.attention_ratio for one in InProcess(tiny).answers(Question(chat) for chat in asked))
    assert both is not None
    assert 0 < both < 1
    assert [image, context] == [alone(tiny, chat).attention_ratio for chat in asked[1:]]


# ------------------------------------------------------------------------------------------------------------- auto


def expected_auto(engine: Engine, chat: Chat, auto: Auto) -> Reply:
    """Return the reply to the same question, asked and decided alone."""
    (found,) = steering.measure(engine, [chat])
    return replace(alone(engine, chat, (auto.steer(found),)), auto={"toward": found.toward, **found.report()})


def test_auto_is_decided_for_every_question_also_among_stated_ones(
    tiny: Engine, vector: SteeringVector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcess, "AUTO_AT_ONCE", 3)
    pushes = [
        Push("auto", vector, 0.3), None, Push("auto", vector, 0.2, (0,)), Push("text", vector, 0.3),
        Push("auto", vector, 0.3), Push("auto", vector, 0.4, (2,)), Push("vision", vector, 0.3),
    ]  # fmt: skip
    asked = chats(len(pushes))
    expected = []
    for chat, push in zip(asked, pushes, strict=True):
        if push is not None and push.toward == "auto":
            expected.append(expected_auto(tiny, chat, Auto(vector, push.strength, push.layers)))
        else:
            steers = () if push is None else (Steer.to(vector, push.toward, push.strength, layers=push.layers),)
            expected.append(alone(tiny, chat, steers))
    replies = list(InProcess(tiny).answers(Question(*one, TOKENS) for one in zip(asked, pushes, strict=True)))
    same(replies, expected)
    assert [one.auto is None for one in replies] == [one.auto is None for one in expected]
    for one, other in zip(replies, expected, strict=True):
        if one.auto is not None and other.auto is not None:
            numbers, others = dict(one.auto), dict(other.auto)
            for name in ("toward", "criterion", "abstained"):
                assert numbers.pop(name) == others.pop(name)
            assert numbers == pytest.approx(others, rel=1e-2)


def test_the_way_of_a_question_is_its_own_whatever_is_found_for_the_others(
    tiny: Engine, vector: SteeringVector, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = chats(7)
    ways = [
        Reliability(0.9, 0.1, 0.8), Reliability(0.9, 0.8, 0.1), Reliability(0.9, 0.88, 0.89), Reliability(0.8, 0.1, 0.2),
        Reliability(0.8, 0.85, 0.84), Reliability(0.7, 0.6, 0.1), Reliability(0.7, 0.3, 0.5),
    ]  # fmt: skip
    batches = []

    def measured(engine: Engine, some: Sequence[Chat], criterion: Criterion) -> list[Reliability]:
        assert (engine, criterion) == (tiny, DROP)
        batches.append(len(some))
        return [ways[asked.index(chat)] for chat in some]

    monkeypatch.setattr(answering, "find", measured)
    monkeypatch.setattr(InProcess, "AUTO_AT_ONCE", 5)
    push = Push("auto", vector, 0.4)
    replies = list(InProcess(tiny).answers(Question(chat, push, TOKENS) for chat in asked))
    toward = ["vision", "text", None, "vision", None, "text", "vision"]
    same(
        replies,
        [
            alone(tiny, chat, () if side is None else (Steer.to(vector, side, 0.4),))
            for chat, side in zip(asked, toward, strict=True)
        ],
    )
    assert [one.auto for one in replies] == [{"toward": way.toward, **way.report()} for way in ways]
    assert [one.auto["toward"] for one in replies if one.auto] == toward
    assert batches == [5, 2]


def test_every_question_has_its_own_criterion(tiny: Engine, vector: SteeringVector) -> None:
    asked = chats(6)
    values = [value for value, _ in steering.surprises(tiny, asked)]
    bound = sum(sorted(value for value in values if value is not None)[2:4]) / 2
    criteria = [DROP, Criterion("surprise", bound), Criterion("surprise", bound, one_degraded=True)] * 2
    pushes = [Push("auto", vector, 0.3, criterion=criterion) for criterion in criteria]
    replies = list(InProcess(tiny).answers(Question(*one, TOKENS) for one in zip(asked, pushes, strict=True)))
    toward = []
    for reply, chat, value, criterion in zip(replies, asked, values, criteria, strict=True):
        assert reply.auto is not None
        assert value is not None
        (found,) = steering.find(tiny, [chat], criterion)
        toward.append(found.toward)
        assert (reply.auto["toward"], reply.auto["criterion"]) == (found.toward, criterion.name)
        if criterion.name == "surprise":
            within = "text" if criterion.one_degraded else None
            assert found.toward == ("vision" if value > bound else within)
            assert reply.auto["surprise"] == pytest.approx(value, rel=1e-3)
        same([reply], [replace(alone(tiny, chat, (Auto(vector, 0.3).steer(found),)), auto=reply.auto)])
    assert len(set(toward)) > 1


def test_more_questions_than_are_measured_at_once(
    tiny: Engine, vector: SteeringVector, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []

    def measured(engine: Engine, some: Sequence[Chat], criterion: Criterion) -> list[Reliability]:
        batches.append(len(some))
        return [Reliability(0.9, 0.1, 0.8)] * len(some)

    monkeypatch.setattr(answering, "find", measured)
    chat, push = chats(1)[0], Push("auto", vector, 0.3)
    replies = list(InProcess(tiny).answers([Question(chat, push, 1)] * (InProcess.AUTO_AT_ONCE + 3)))
    same(replies, [replies[0]] * (InProcess.AUTO_AT_ONCE + 3))
    assert all(reply.auto == replies[0].auto for reply in replies)
    assert batches == [InProcess.AUTO_AT_ONCE, 3]


def test_without_context_there_is_nothing_to_find_out(tiny: Engine, vector: SteeringVector) -> None:
    chat = messages(make_samples(1)[0], "image_only", False)
    with pytest.raises(steering.RequestError, match="needs an image and a text context"):
        list(InProcess(tiny).answers([Question(chat, Push("auto", vector))]))


# ----------------------------------------------------------------------------------------------- refused, identity


@pytest.mark.parametrize("toward", ["vision", "text", "auto"])
def test_a_vector_by_its_name_is_refused(tiny: Engine, toward: Any) -> None:
    with pytest.raises(ValueError, match="give the vector 'modality-preference' as an object, not by its name"):
        list(InProcess(tiny).answers([Question(chats(1)[0], Push(toward, "modality-preference"))]))


def test_questions_are_taken_as_they_are_needed(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "AUTO_AT_ONCE", 2)
    taken = []

    def questions() -> Iterator[Question]:
        for chat in chats(60):
            taken.append(chat)
            yield Question(chat, max_tokens=1)

    replies = InProcess(tiny).answers(questions())
    next(replies)
    assert len(taken) < 30
    assert len(list(replies)) == 59


def test_the_identity_is_that_of_the_weights_and_their_type(tiny: Engine) -> None:
    identity = InProcess(tiny).identity
    assert tiny.mllm.fingerprint in identity
    assert "float32" in identity
    assert version("torch") in identity


def test_a_chat_template_of_the_command_line_asks_otherwise_and_is_no_longer_the_same(
    root: Path, tmp_path: Path
) -> None:
    folder = families.checkpoint("qwen2_vl", root)
    file = tmp_path / "loud.jinja"
    plain = InProcess(ModelOptions(str(folder), "cpu", slots=2).engine(quiet=True))
    file.write_text("LOUD " + plain.engine.mllm.chat.text)
    loud = InProcess(ModelOptions(str(folder), "cpu", slots=2, chat_template=str(file)).engine(quiet=True))
    assert loud.engine.mllm.chat.text == file.read_text()
    assert plain.identity != loud.identity, "an earlier run's answers are not taken for these"


def test_a_model_that_needs_images_is_shown_a_gray_one(root: Path) -> None:
    engine = Engine(steering.load(families.checkpoint("paligemma", root), device="cpu"), slots=2, max_length=512)
    sample = make_samples(1)[0]
    chat = messages(sample, "context_only", swapped=False)
    gray = Image.new("RGB", (224, 224), (128, 128, 128))
    shown = [{"role": "user", "content": [{"type": "image", "image": gray}, *chat[0]["content"]]}]
    unseen, seen = InProcess(engine).answers([Question(chat, max_tokens=4), Question(shown, max_tokens=4)])
    assert unseen.text == seen.text
    assert unseen.attention_ratio == pytest.approx(seen.attention_ratio, abs=1e-6)


# ---------------------------------------------------------------------------------------------------- interventions


@pytest.mark.parametrize(
    ("interventions", "asked_of_it"),
    [
        ((See(alpha=0.3), Generate(refresh=1)), Sage(See(alpha=0.3), None, Generate(refresh=1))),
        ((Icd(alpha=0.5),), [Icd(alpha=0.5)]),
    ],
)
def test_an_intervened_answer_is_the_engines(
    tiny: Engine, interventions: tuple[Options, ...], asked_of_it: Any
) -> None:
    asked = chats(3)
    replies = InProcess(tiny).answers(
        Question(chat, None, TOKENS, what, diagnose=None) for chat in asked for what in (interventions, ())
    )
    both = list(replies)
    changed, plain = both[::2], both[1::2]
    expected = tiny.generate([Request(chat, Sampling(max_tokens=TOKENS), asked_of_it) for chat in asked])
    assert [one.text for one in changed] == [one.choices[0].text for one in expected]
    assert [one.text for one in changed] != [one.text for one in plain]
    assert [one.attention_ratio for one in changed] == [None] * 3


def test_the_requests_that_an_intervention_needs_first_are_answered_first(tiny: Engine) -> None:
    asked = chats(3)
    questions = [Question(chat, max_tokens=TOKENS, interventions=(Vista(strength=0.5),)) for chat in asked]
    expected = [
        tiny.generate([steering.decide(tiny, Request(chat, Sampling(max_tokens=TOKENS), Vista(strength=0.5)))])[0]
        for chat in asked
    ]
    assert [reply.text for reply in InProcess(tiny).answers(questions)] == [one.choices[0].text for one in expected]


def test_a_push_goes_with_interventions(tiny: Engine, vector: SteeringVector) -> None:
    chat = chats(1)[0]
    (reply,) = InProcess(tiny).answers([Question(chat, Push("text", vector, 0.4), TOKENS, (See(alpha=0.3),))])
    request = Request(
        chat, Sampling(max_tokens=TOKENS), [Steer.to(vector, "text", 0.4), See(alpha=0.3)],
        diagnose=Diagnose(frozenset({"modality"})),
    )  # fmt: skip
    choice = tiny.generate([request])[0].choices[0]
    assert choice.diagnostics is not None
    assert reply == Reply(choice.text, choice.diagnostics)


def test_answers_under_other_thresholds_of_think_are_another_models(tiny: Engine) -> None:
    def identity(*quantiles: float) -> str:
        mllm = copy.copy(tiny.mllm)
        mllm.calibration = Calibration(mllm.fingerprint, divergence=(quantiles,)) if quantiles else None
        return InProcess(cast("Engine", SimpleNamespace(mllm=mllm))).identity

    assert len({identity(), identity(0.1), identity(0.2)}) == 3
    assert identity(0.1) == identity(0.1)


def test_the_odds_of_yes_are_those_of_plain_transformers() -> None:
    """The embedded model is sure enough that both words are among the likeliest tokens."""
    folder = Path(__file__).parents[3] / "demo" / "checkpoint"
    plain, engine = Plain(folder), Engine(steering.load(folder), slots=1, max_length=128)
    image = Image.new("RGB", (84, 84), "green")
    chat: Chat = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "Is there a star?"}]}
    ]
    (reply,) = InProcess(engine).answers([Question(chat, odds=True, diagnose=None)])
    logprobs = plain.answer(list(chat), 1).logprobs[0]
    by_word = {
        word: torch.logsumexp(torch.stack([
            logprobs[token] for token in range(len(logprobs)) if plain.tokenizer.decode([token]).strip().lower() == word
        ]), 0)
        for word in ("yes", "no")
    }  # fmt: skip
    assert reply.odds == pytest.approx(
        float(by_word["yes"] - by_word["no"]), abs=1e-2
    )  # its weights are of half precision
    (reply,) = InProcess(engine).answers([Question(chat, diagnose=None)])
    assert reply.odds is None
