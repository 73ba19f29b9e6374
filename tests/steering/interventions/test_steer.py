"""Steered answers equal those of the plain model with forward hooks; neighbours and zero strength feel nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from steering import (
    TOKENS,
    Choice,
    Request,
    RequestError,
    Sampling,
    Steer,
    VectorError,
)
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadMLLM, LoadPlain, MakeEngine
from tests.steering.interventions.pushes import SAMPLING, STEPS, assert_same, by_hand, chat, make_vector

# --- the model's answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "budget"), [*((family, 24) for family in families.ANSWERING), ("qwen2_vl", 400), ("gemma3", 400)]
)
def test_every_choice_of_tokens_is_exact_in_one_batch(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=6, prefill_budget=budget)
    plain = load_plain(family)
    vector = make_vector(engine.mllm)
    delta = by_hand(vector, -1.3, (0, 2))
    settings: list[str | None] = [None, *(TOKENS if family in OF_EACH_KIND else ("image", "text", "generated"))]
    requests = [
        Request(
            chat(family),
            SAMPLING,
            interventions=[() if tokens is None else (Steer(vector, -1.3, tokens=tokens),)],
        )
        for tokens in settings
    ]
    answers = [
        plain.answer(chat(family), STEPS, add=[] if tokens is None else [(delta, tokens)]) for tokens in settings
    ]
    for result, answer in zip(engine.generate(requests), answers, strict=True):
        assert_same(result.choices[0], answer)
    # The settings do differ from each other, or equal answers would say little.
    first = [answer.logprobs[1] for answer in answers]
    for number, row in enumerate(first):
        assert all((row - later).abs().max() > 0.05 for later in first[number + 1 :])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "aya_vision"])
def test_several_vectors_add_up(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine(family)
    first_vector, second_vector = make_vector(engine.mllm), make_vector(engine.mllm, "other", seed=1, layers=(1, 2))
    steering = (
        Steer(first_vector, 0.7),
        Steer(second_vector, -0.5, tokens="image"),
        Steer(second_vector, 0.4, layers=(0,), tokens="generated"),
        Steer(first_vector, 0.3, layers=(1,), tokens="text"),
    )
    additions = [
        (by_hand(first_vector, 0.7, (0, 2)), "all"),
        (by_hand(second_vector, -0.5, (1, 2)), "image"),
        (by_hand(second_vector, 0.4, (0,)), "generated"),
        (by_hand(first_vector, 0.3, (1,)), "text"),
    ]
    choice = engine.generate([Request(chat(family), SAMPLING, interventions=[steering])])[0].choices[0]
    assert_same(choice, load_plain(family).answer(chat(family), STEPS, add=additions))
    assert choice.applied is not None
    assert [applied["name"] for applied in choice.applied["steering"]] == ["test", "other", "other", "test"]


def test_pushing_with_a_negated_vector_is_pushing_the_other_way(make_engine: MakeEngine) -> None:
    engine = make_engine("llava")
    vector = make_vector(engine.mllm)
    request = Request(chat("llava"), SAMPLING)
    negated, opposite = (
        engine.generate([dataclasses.replace(request, interventions=[(steer,)])])[0].choices[0]
        for steer in (Steer(vector, 0.9), Steer(-vector, -0.9))
    )
    assert negated.logprobs == opposite.logprobs


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_neighbours_of_steered_requests_keep_every_bit(family: str, make_engine: MakeEngine) -> None:
    """To the last bit, in prefill and in decoding, with the same neighbours steered or not."""
    strong = Steer(make_vector(make_engine(family).mllm, layers=(0, 1, 2)), 40.0)
    chats = [chat(family), families.example_messages(family, 1, text="How many?"), chat(family, 1)]

    def answers(steering: tuple[Steer, ...]) -> list[Choice]:
        requests = [
            Request(chats[0], SAMPLING),
            Request(chats[1], SAMPLING, interventions=[steering]),
            Request(chats[2], SAMPLING),
        ]
        return [result.choices[0] for result in make_engine(family).generate(requests)]

    before, after = answers(()), answers((strong,))
    assert before[1].token_ids != after[1].token_ids
    for number in (0, 2):
        if family == "qwen3_vl_moe":  # experts are fed in groups, whose size changes how sums are rounded
            for after_token, before_token in zip(
                after[number].logprobs or (), before[number].logprobs or (), strict=True
            ):
                assert after_token.logprob == pytest.approx(before_token.logprob, abs=1e-5)
        else:
            assert after[number].logprobs == before[number].logprobs
        assert after[number].token_ids == before[number].token_ids
        assert after[number].applied is None


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_strength_zero_is_exactly_off(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family)
    off = engine.generate([Request(chat(family), SAMPLING)])[0].choices[0]
    steer = Steer.to(make_vector(engine.mllm), "vision", 0.0)
    zero = engine.generate([Request(chat(family), SAMPLING, interventions=[(steer,)])])[0].choices[0]
    assert zero.logprobs == off.logprobs
    assert zero.applied is not None
    assert zero.applied["steering"][0]["dose"] == 0.0


def test_a_slot_keeps_nothing_of_a_steered_predecessor(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    plain = engine.generate([Request(chat("qwen2_vl"), SAMPLING)])[0].choices[0]
    steer = Steer(make_vector(engine.mllm), 5.0)
    engine.generate([Request(chat("qwen2_vl"), SAMPLING, interventions=[(steer,)])])
    assert engine.generate([Request(chat("qwen2_vl"), SAMPLING)])[0].choices[0].logprobs == plain.logprobs


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_the_baseline_is_the_answer_without_steering(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family)
    steer = Steer(make_vector(engine.mllm), 1.5)
    request = Request(chat(family), SAMPLING, interventions=[(steer,)], baseline=True)
    choice = engine.generate([request])[0].choices[0]
    assert choice.baseline is not None
    assert_same(choice.baseline, load_plain(family).answer(chat(family), STEPS))
    assert choice.baseline.applied is None
    assert_same(choice, load_plain(family).answer(chat(family), STEPS, add=[(steer.delta, "all")]))


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_each_of_n_answers_is_steered(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine(family)
    steer = Steer(make_vector(engine.mllm), 0.6)
    sampling = dataclasses.replace(SAMPLING, temperature=1.2, seed=4)
    for choice in engine.generate([Request(chat(family), sampling, interventions=[(steer,)], n=3)])[0].choices:
        forced = load_plain(family).answer(chat(family), STEPS, add=[(steer.delta, "all")], forced=choice.token_ids)
        assert_same(choice, forced)


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [400, 11])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_next"])
def test_applied_counts_tokens_and_weighs_the_dose(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=6, prefill_budget=budget)
    vector = make_vector(engine.mllm)
    requests = [
        Request(chat(family), SAMPLING, interventions=[(Steer(vector, 1.2, tokens=tokens, toward="text"),)])
        for tokens in TOKENS
    ]
    _, *results = engine.generate([Request(chat(family, 1), SAMPLING), *requests])
    for tokens, result in zip(TOKENS, results, strict=True):
        delta = by_hand(vector, 1.2, (0, 2))
        answer = load_plain(family).answer(chat(family), 1, add=[(delta, tokens)])
        image = answer.ids == engine.mllm.image_token_id
        n, fed = len(image), STEPS - 1
        counts = {
            "all": n + fed,
            "prompt": n,
            "generated": fed,
            "image": int(image.sum()),
            "text": int((~image).sum()),
        }
        # The mean of |added| / |h| over the touched tokens of the prompt.
        touched = {
            "all": image | True,
            "prompt": image | True,
            "generated": image & False,
            "image": image,
            "text": ~image,
        }[tokens]
        doses = [(delta[layer].norm() / answer.hidden[layer, :n][touched].norm(dim=-1)).mean() for layer in (0, 2)]
        assert result.choices[0].applied == {
            "steering": [
                {
                    "name": "test",
                    "digest": vector.identity,
                    "toward": "text",
                    "strength": 1.2,
                    "published": None,
                    "scale": 1.2,
                    "layers": [0, 2],
                    "apply": {"tokens": tokens},
                    "tokens": counts[tokens],
                    "dose": None if tokens == "generated" else pytest.approx(float(sum(doses) / 2), rel=1e-3),
                    "warning": None,
                }
            ]
        }


def test_without_images_an_image_push_touches_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    steer = Steer(make_vector(engine.mllm), 1.0, tokens="image")
    text_chat: Any = [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}]
    off, on = (
        engine.generate([Request(text_chat, SAMPLING, interventions=[steering])])[0].choices[0]
        for steering in ((), (steer,))
    )
    assert on.logprobs == off.logprobs
    assert on.applied is not None
    assert (on.applied["steering"][0]["tokens"], on.applied["steering"][0]["dose"]) == (0, None)


@pytest.mark.parametrize(("scale", "warned"), [(1.5, False), (-1.5, False), (1.6, True), (-1.6, True)])
def test_a_strength_beyond_the_calibrated_range_warns(scale: float, warned: bool, make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector = dataclasses.replace(make_vector(engine.mllm), info={"calibration": {"range": [0.5, 1.5]}})
    request = Request(chat("qwen2_vl"), Sampling(max_tokens=1), interventions=[(Steer(vector, scale),)])
    applied = engine.generate([request])[0].choices[0].applied
    assert applied is not None
    warning = applied["steering"][0]["warning"]
    assert warning == ("strength 1.6 is beyond the calibrated range 0.5 to 1.5" if warned else None)


# --- options ---------------------------------------------------------------------------------------------------------


def test_toward_text_is_along_the_vector_and_toward_vision_against_it(load_mllm: LoadMLLM) -> None:
    vector = make_vector(load_mllm("llava"))
    text, vision = Steer.to(vector, "text", 1.5), Steer.to(vector, "vision", 1.5, tokens="prompt", layers=(1,))
    assert (text.scale, text.toward, text.tokens, text.layers) == (1.5, "text", "all", None)
    assert (vision.scale, vision.toward, vision.tokens, vision.layers) == (-1.5, "vision", "prompt", (1,))
    torch.testing.assert_close(text.delta, by_hand(vector, 1.5, (0, 2)))
    torch.testing.assert_close(vision.delta, by_hand(vector, -1.5, (1,)))
    assert [str(Steer.to(vector, toward, 0.0).scale) for toward in ("text", "vision")] == ["0.0", "0.0"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"scale": float("nan")}, "steering.scale"),
        ({"scale": float("inf")}, "steering.scale"),
        ({"scale": 1.0, "tokens": "most"}, "steering.apply.tokens"),
        *(
            ({"scale": 1.0, "tokens": f"image:{number}"}, "steering.apply.tokens")
            for number in ("", "0", "-1", "01", "1.0", "one", "1 ", "1\n", "10000", "٢")
        ),
        ({"scale": 1.0, "layers": ()}, "steering.layers"),
        ({"scale": 1.0, "layers": (1, 1)}, "steering.layers"),
        ({"scale": 1.0, "layers": (3,)}, "steering.layers"),
        ({"scale": 1.0, "layers": (-1,)}, "steering.layers"),
    ],
)
def test_impossible_options_name_the_field(options: dict[str, Any], param: str, load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError) as refused:
        Steer(make_vector(load_mllm("llava")), **options)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (("left",), "steering.toward"),
        (("text", -1.0), "steering.strength"),
        (("text", float("nan")), "steering.strength"),
        (("vision", float("inf")), "steering.strength"),
    ],
)
def test_impossible_pushes_name_the_field(arguments: tuple[Any, ...], param: str, load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError) as refused:
        Steer.to(make_vector(load_mllm("llava")), *arguments)
    assert refused.value.param == param


def test_a_vector_of_another_model_is_refused(make_engine: MakeEngine, load_mllm: LoadMLLM) -> None:
    foreign = make_vector(load_mllm("qwen2_5_vl"))
    engine = make_engine("qwen2_vl")
    with pytest.raises(VectorError, match="fingerprint") as refused:
        engine.submit(Request(chat("qwen2_vl"), SAMPLING, interventions=[(Steer(foreign, 1.0),)]))
    assert refused.value.code == "wrong_model"


def test_a_vector_of_another_shape_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector = make_vector(engine.mllm)
    narrow = dataclasses.replace(vector, direction=vector.direction[:, :-1])
    with pytest.raises(VectorError, match="shape") as refused:
        engine.submit(Request(chat("qwen2_vl"), SAMPLING, interventions=[(Steer(narrow, 1.0),)]))
    assert refused.value.code == "wrong_shape"
