"""The surprise of a text context, compared with plain transformers on the same text, and its consequences."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import (
    Auto,
    Criterion,
    Fault,
    Request,
    RequestError,
    Sampling,
    Surprise,
    UnsupportedModel,
    check_auto,
    decide,
    find,
    surprises,
)
from steering.model.calibration import FILE, Calibration
from steering.prompt.chat import contexts_of
from steering.prompt.layout import build_prompt
from steering.prompt.spans import REPLY
from steering.recorders import reply
from tests import families
from tests.steering.auto.test_reliability import part
from tests.steering.conftest import LoadMLLM, LoadPlain, MakeEngine
from tests.steering.interventions.pushes import unit_vector
from tests.steering.plain import Plain

Chat = list[dict[str, Any]]

LONG = "The dog, which is brown and old, sleeps under the big tree until the sun has gone."


def turn(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def picture(index: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": families.example_image(index)}


def cases() -> list[tuple[Chat, Chat, str]]:
    """Chats, the same without images and context (written by hand), and the context."""
    ball, dog = part("What is the ball?"), part("What does it do?")
    return [
        (
            [turn("user", picture(), part("Text context: the ball is red.\nWhat is the ball?"))],
            [turn("user", ball)],
            "the ball is red.",
        ),
        (
            [
                turn("user", picture(), part(LONG, span="context"), dog),
                turn("assistant", part("It sleeps.")),
                turn("user", ball),
            ],
            [turn("user", dog), turn("assistant", part("It sleeps.")), turn("user", ball)],
            LONG,
        ),
    ]


@torch.inference_mode()
def plain_logprobs(plain: Plain, bare: Chat, context: str) -> list[float]:
    """Return the log-probabilities of the context's tokens from one uncached pass over the chat and its reply.

    The model's own template writes the text.
    """
    text = plain.processor.apply_chat_template([*bare, turn("assistant", part(context))], tokenize=False)
    start = text.rindex(context)
    text = text[: start + len(context)]
    bos = plain.tokenizer.bos_token
    encoded = plain.tokenizer(
        text,
        return_tensors="pt",
        return_offsets_mapping=True,
        add_special_tokens=bos is None or not text.startswith(bos),
    )
    ends = encoded.offset_mapping[0, :, 1].tolist()
    indices = [i for i, end in enumerate(ends) if end > start]
    logits = plain.model(input_ids=encoded.input_ids, use_cache=False).logits[0].float()
    if hasattr(plain.model.model, "rope_deltas"):
        plain.model.model.rope_deltas = None
    return [float(logits[i - 1].log_softmax(-1)[encoded.input_ids[0, i]]) for i in indices]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v", "internvl", "idefics3"])
def test_log_probabilities_equal_the_plain_models(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine(family), load_plain(family)
    cases_given = cases()
    results = engine.generate(Request(bare, Sampling(max_tokens=1), reply=context) for _, bare, context in cases_given)
    measured = surprises(engine, [chat for chat, _, _ in cases_given])
    for result, (value, count), (_, bare, context) in zip(results, measured, cases_given, strict=True):
        expected = plain_logprobs(plain, bare, context)
        assert len(expected) > 3
        scored = result.choices[0].reply_logprobs
        assert scored is not None
        assert scored.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert (value, count) == (pytest.approx(-min(expected[1:]), rel=1e-3), 1)


def test_a_reply_read_in_chunks_has_the_same_log_probabilities(
    make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, bare, context = cases()[1]
    expected = plain_logprobs(load_plain("qwen2_vl"), bare, context)
    request = Request(bare, Sampling(max_tokens=1), reply=context, n=2)
    monkeypatch.setattr(reply, "ROWS", 3)
    for budget in (1024, 7):
        (result,) = make_engine("qwen2_vl", prefill_budget=budget).generate([request])
        for choice in result.choices:
            assert choice.reply_logprobs is not None
            assert choice.reply_logprobs.tolist() == pytest.approx(expected, rel=1e-3)


def test_logits_are_made_for_the_reply_alone(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2_vl")
    rows: list[int] = []
    head = engine.mllm.head

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(engine.mllm, "head", counted)
    monkeypatch.setattr(reply, "ROWS", 8)
    _, bare, context = cases()[1]
    (result,) = engine.generate([Request(bare, Sampling(max_tokens=1), reply=context)])
    scored = result.choices[0].reply_logprobs
    assert scored is not None
    assert sum(rows) == len(scored) + 1  # and the row that generates
    assert max(rows) == 8
    assert result.prompt_tokens > 2 * len(scored)


def test_a_measurement_costs_one_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    chat, bare, context = cases()[0]
    length = build_prompt(engine.mllm, bare, context).length
    before = engine.stats()
    surprises(engine, [chat])
    after = engine.stats()
    spent = {name: after[name] - before[name] for name in ("finished", "prompt_tokens", "generated_tokens")}
    assert spent == {"finished": 1, "prompt_tokens": length, "generated_tokens": 1}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v", "llava"])
def test_texts_are_read_in_one_prefill_with_prompts_that_have_images(
    family: str, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    chat, bare, context = cases()[0]
    requests = [
        Request(bare, Sampling(max_tokens=1), reply=context),
        Request(chat, Sampling(max_tokens=3, ignore_eos=True, logprobs=0)),
    ]
    engine = make_engine(family)
    read, answered = engine.generate(requests)
    assert caplog.records == []  # a prefill that fails is run again, prompt by prompt
    (alone,) = engine.generate(requests[:1])
    (unmixed,) = engine.generate(requests[1:])
    assert read.choices[0].reply_logprobs is not None
    assert alone.choices[0].reply_logprobs is not None
    torch.testing.assert_close(read.choices[0].reply_logprobs, alone.choices[0].reply_logprobs, rtol=1e-4, atol=1e-4)
    assert [token.logprob for token in answered.choices[0].logprobs or ()] == pytest.approx(
        [token.logprob for token in unmixed.choices[0].logprobs or ()], rel=1e-4
    )


def test_a_prompt_ends_with_its_reply(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    _, bare, context = cases()[0]
    prompt = build_prompt(mllm, bare, context)
    reply_columns = prompt.layout.columns(REPLY)
    assert mllm.tokenizer.decode(prompt.ids[reply_columns]) == context
    assert reply_columns.tolist() == list(range(prompt.length - len(reply_columns), prompt.length))
    chat = build_prompt(mllm, bare)
    assert torch.equal(prompt.ids[: chat.length], chat.ids)
    assert chat.layout.count(REPLY) == 0


def test_special_tokens_in_a_context_stay_text(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    prompt = build_prompt(engine.mllm, cases()[0][1], "the ball <|im_end|> is red.")
    inside = prompt.ids[prompt.layout.columns(REPLY)]
    assert engine.mllm.tokenizer.decode(inside) == "the ball <|im_end|> is red."
    assert not bool(torch.isin(inside, engine.mllm.special_ids).any())


def test_contexts_of_a_chat_are_found() -> None:
    lines = "Text context: the ball is red.\nText context:  The dog sleeps. \nWhat?\nText context:\n"
    chat = [
        {"role": "system", "content": "Text context: the tree is big."},
        {"role": "user", "content": lines},
        {"role": "assistant", "content": "Text context: said, not given."},
        turn("user", picture(), part("Text context: Two\nlines.\n", span="context"), part("And?")),
    ]
    assert contexts_of(chat) == ["the tree is big.", "the ball is red.", "The dog sleeps.", "Two\nlines."]


def test_the_most_surprising_of_several_contexts_counts(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    words = ["the ball is red.", "The dog sleeps.", LONG]
    alone = [surprises(engine, [_with(word)])[0][0] for word in words]
    together = surprises(engine, [_with(*words), _with(*words[::-1])])
    assert together == [(pytest.approx(max(alone)), 3)] * 2  # type: ignore[type-var]
    assert len(set(alone)) == 3


def _with(*contexts: str) -> Chat:
    return [turn("user", picture(), *(part(context, span="context") for context in contexts), part("What is it?"))]


def test_messages_after_the_users_last_turn_are_not_read(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    chat, _, _ = cases()[0]
    assert surprises(engine, [[*chat, turn("assistant", part("It"))]]) == surprises(engine, [chat])


def test_a_context_of_one_token_has_no_surprise(make_engine: MakeEngine, load_mllm: LoadMLLM) -> None:
    word = next(w for w in ("a", "the", "x") if len(load_mllm("qwen2_vl").tokenizer(w).input_ids) == 1)
    engine = make_engine("qwen2_vl")
    assert surprises(engine, [_with(word)]) == [(None, 1)]
    (surprise,) = find(engine, [_with(word)], Criterion("surprise", bound=1.0, one_degraded=True))
    assert surprise.toward is None
    assert "no second token" in str(surprise.abstained)


@pytest.mark.parametrize(
    ("value", "one_degraded", "toward"),
    [(5.1, False, "vision"), (5.1, True, "vision"), (5.0, False, None), (5.0, True, "text"), (0.1, False, None)],
)
def test_beyond_the_bound_the_text_is_distrusted(value: float, one_degraded: bool, toward: str | None) -> None:
    surprise = Surprise(value, 5.0, 1, one_degraded)
    assert surprise.toward == toward
    report = surprise.report()
    assert (report["criterion"], report["surprise"], report["bound"]) == ("surprise", value, 5.0)
    assert (report["abstained"] is None) == (toward is not None)


def test_a_request_is_steered_by_surprise_and_says_so(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine("qwen2_vl")
    vector = unit_vector(engine.mllm)
    chat, bare, context = cases()[0]
    value = -min(plain_logprobs(load_plain("qwen2_vl"), bare, context)[1:])
    request = Request(chat, Sampling(max_tokens=3, ignore_eos=True))
    for bound, one_degraded, scale in ((value - 1, False, -0.5), (value + 1, False, 0.0), (value + 1, True, 0.5)):
        auto = Auto(vector, 0.5, criterion=Criterion("surprise", bound, one_degraded))
        decided = decide(engine, replace(request, interventions=auto))
        assert decided.asked["steering"].steers[0].scale == scale
        (choice,) = engine.generate([decided])[0].choices
        assert choice.applied is not None
        (applied,) = choice.applied["steering"]
        assert applied["toward"] == {-0.5: "vision", 0.0: None, 0.5: "text"}[scale]
        abstained = None if scale else applied["auto"]["abstained"]
        assert applied["auto"] == {
            "criterion": "surprise", "surprise": pytest.approx(value, rel=1e-3), "bound": bound, "contexts": 1,
            "one_degraded": one_degraded, "abstained": abstained, "calibration": None,
        }  # fmt: skip
        assert scale or "is within the bound" in abstained
        if not scale:
            (plain,) = engine.generate([request])[0].choices
            assert plain.token_ids == choice.token_ids


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"name": "kl"}, "steering.auto.criterion"),
        ({"bound": 1.0}, "steering.auto.bound"),
        ({"one_degraded": True}, "steering.auto.one_degraded"),
        ({"name": "surprise", "bound": -1.0}, "steering.auto.bound"),
        ({"name": "surprise", "bound": math.inf}, "steering.auto.bound"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as refused:
        Criterion(**options)
    assert refused.value.param == param


def test_a_model_that_was_not_calibrated_needs_a_bound(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    with pytest.raises(RequestError, match="'helmsight probe --calibrate-surprise'") as refused:
        find(engine, [cases()[0][0]], Criterion("surprise"))
    assert refused.value.param == "steering.auto.bound"
    (surprise,) = find(engine, [cases()[0][0]], Criterion("surprise", bound=3.0))
    assert surprise.report()["bound"] == 3.0


def test_a_model_that_cannot_do_without_images_cannot_read_the_text_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("paligemma")
    with pytest.raises(RequestError, match=r"without images, which .* cannot do") as refused:
        find(engine, [cases()[0][0]], Criterion("surprise", bound=3.0))
    assert refused.value.param == "steering.auto.criterion"


def test_without_an_image_or_a_context_there_is_nothing_to_weigh(make_engine: MakeEngine) -> None:
    engine, criterion = make_engine("qwen2_vl"), Criterion("surprise", bound=3.0)
    for chat in (
        [turn("user", part("Text context: the ball is red.\nWhat?"))],
        [turn("user", picture(), part("What is the ball?"))],
    ):
        with pytest.raises(RequestError, match="needs an image and a text context") as refused:
            find(engine, [chat], criterion)
        assert refused.value.param == "steering.toward"
    for count in (0, 17):
        chat = _with(*["the ball is red."] * count) if count else _with("  ")
        with pytest.raises(RequestError, match=f"from 1 to 16 text contexts; the request has {count}"):
            find(engine, [chat], criterion)
    assert len(find(engine, [_with(*["the ball."] * 16)], criterion)) == 1


def test_a_measurement_can_be_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector = unit_vector(engine.mllm)
    for criterion in (Criterion(), Criterion("surprise", bound=1.0)):
        before = engine.stats()["generated_tokens"]
        with pytest.raises(Fault, match="cancelled"):
            decide(
                engine,
                Request(cases()[0][0], interventions=Auto(vector, criterion=criterion)),
                lambda completion: completion.cancel(),
            )
        assert engine.stats()["generated_tokens"] == before
        engine.step()
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


# ------------------------------------------------------------------------------------------------------- calibration


def test_the_bound_is_a_quantile_and_is_kept(root: Path, tmp_path: Path) -> None:
    values = torch.arange(101.0)[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    folder = Path(shutil.copytree(families.checkpoint("qwen2_vl", root), tmp_path / "model"))
    fingerprint = steering.load(folder, device="cpu").fingerprint
    measured = Calibration(fingerprint).with_surprise(values)
    assert (measured.surprise, measured.contexts) == (98.0, 101)
    with_divergence = measured.with_divergence(torch.rand(families.LAYERS, 50), samples=3)
    assert with_divergence.surprise == 98.0  # one measurement leaves the others as they were
    with_divergence.save(folder)
    mllm = steering.load(folder, device="cpu")
    assert mllm.calibration == with_divergence
    engine = steering.Engine(mllm, slots=2, max_length=512, self_check=False)
    (surprise,) = find(engine, [cases()[0][0]], Criterion("surprise"))
    assert surprise.report()["bound"] == 98.0
    check_auto(mllm, Auto(unit_vector(mllm), criterion=Criterion("surprise")))
    mllm.calibration = replace(with_divergence, surprise=None)
    with pytest.raises(RequestError, match="was not calibrated"):
        check_auto(mllm, Auto(unit_vector(mllm), criterion=Criterion("surprise")))


@pytest.mark.parametrize("bound", ["high", [3.0], True, math.nan])
def test_a_file_with_another_bound_is_refused(bound: Any, tmp_path: Path) -> None:
    path = Calibration("f").with_surprise(torch.rand(9)).save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"surprise": bound}))
    with pytest.raises(UnsupportedModel, match=FILE):
        Calibration.load(tmp_path, "f", 2)
