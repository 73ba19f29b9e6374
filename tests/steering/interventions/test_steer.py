"""Steered answers equal those of the plain model with forward hooks; neighbours and zero strength feel nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from steering import (
    MLLM,
    TOKENS,
    Choice,
    Pai,
    Request,
    RequestError,
    Sampling,
    Steer,
    SteeringVector,
    VectorError,
)
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.plain import Answer, Messages, Plain

LoadMLLM = Callable[[str], MLLM]
LoadPlain = Callable[[str], Plain]
STEPS = 6
SAMPLING = Sampling(max_tokens=STEPS, logprobs=20, ignore_eos=True)


def make_vector(mllm: MLLM, name: str = "test", *, seed: int = 0, layers: tuple[int, ...] = (0, 2)) -> SteeringVector:
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=generator)
    weight = torch.rand(mllm.num_layers, generator=generator) + 0.2
    ones = torch.ones(mllm.num_layers)
    return SteeringVector(name, direction, weight, ones, ones, layers, mllm.fingerprint)


def by_hand(vector: SteeringVector, scale: float, layers: tuple[int, ...]) -> torch.Tensor:
    """c * w_l * v_l at the given layers, (layers, d)."""
    delta = torch.zeros_like(vector.direction)
    for layer in layers:
        delta[layer] = scale * vector.weight[layer] * vector.direction[layer]
    return delta


def assert_same(choice: Choice, answer: Answer) -> None:
    assert list(choice.token_ids) == answer.tokens
    assert choice.logprobs is not None
    for row, token in zip(answer.logprobs, choice.logprobs, strict=True):
        reported = torch.tensor([alternative.logprob for alternative in token.top])
        wanted = row[[alternative.token_id for alternative in token.top]]
        torch.testing.assert_close(reported, wanted, rtol=0, atol=1e-4)


def chat(family: str, images: int = 2) -> Messages:
    return families.example_messages(family, images, system="You are a helpful assistant.")


# --- the model's answers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [400, 11])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_choice_of_tokens_in_one_batch(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=6, prefill_budget=budget)
    plain = load_plain(family)
    vector = make_vector(engine.mllm)
    delta = by_hand(vector, -1.3, (0, 2))
    settings: list[str | None] = [None, *TOKENS]
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
    for number, one in enumerate(first):
        assert all((one - other).abs().max() > 0.05 for other in first[number + 1 :])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3", "aya_vision"])
def test_several_vectors_add_up(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine(family)
    one, other = make_vector(engine.mllm), make_vector(engine.mllm, "other", seed=1, layers=(1, 2))
    steering = (
        Steer(one, 0.7),
        Steer(other, -0.5, tokens="image"),
        Steer(other, 0.4, layers=(0,), tokens="generated"),
        Steer(one, 0.3, layers=(1,), tokens="text"),
    )
    additions = [
        (by_hand(one, 0.7, (0, 2)), "all"),
        (by_hand(other, -0.5, (1, 2)), "image"),
        (by_hand(other, 0.4, (0,)), "generated"),
        (by_hand(one, 0.3, (1,)), "text"),
    ]
    choice = engine.generate([Request(chat(family), SAMPLING, interventions=[steering])])[0].choices[0]
    assert_same(choice, load_plain(family).answer(chat(family), STEPS, add=additions))
    assert choice.applied is not None
    assert [applied["name"] for applied in choice.applied["steering"]] == ["test", "other", "other", "test"]


def test_pushing_with_a_negated_vector_is_pushing_the_other_way(make_engine: MakeEngine) -> None:
    engine = make_engine("llava")
    vector = make_vector(engine.mllm)
    request = Request(chat("llava"), SAMPLING)
    one, other = (
        engine.generate([dataclasses.replace(request, interventions=[(steer,)])])[0].choices[0]
        for steer in (Steer(vector, 0.9), Steer(-vector, -0.9))
    )
    assert one.logprobs == other.logprobs


@pytest.mark.parametrize("family", families.FAMILIES)
def test_neighbours_of_steered_requests_get_exactly_what_they_get_anyway(family: str, make_engine: MakeEngine) -> None:
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
            for one, other in zip(after[number].logprobs or (), before[number].logprobs or (), strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        else:
            assert after[number].logprobs == before[number].logprobs
        assert after[number].token_ids == before[number].token_ids
        assert after[number].applied is None


@pytest.mark.parametrize("family", families.FAMILIES)
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


# --- one image of several --------------------------------------------------------------------------------------------


def image_columns(plain: Plain, messages: Messages, number: int) -> torch.Tensor:
    """(n,) bool: the tokens of one image, counted from 1, by what the processor makes of each picture alone."""
    own = plain.model.config.image_token_id
    counts = []
    for picture in families.images_of(messages):
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]
        counts.append(int((plain.inputs([{"role": "user", "content": parts}])["input_ids"] == own).sum()))
    image = plain.inputs(messages)["input_ids"][0] == own
    assert sum(counts) == int(image.sum())
    before = image.cumsum(0) - 1
    return image & (before >= sum(counts[: number - 1])) & (before < sum(counts[:number]))


@contextmanager
def added_to(plain: Plain, columns: torch.Tensor, delta: torch.Tensor) -> Iterator[None]:
    """The plain model with a vector added to some columns of its prompt. delta: (layers, d)."""

    def hook(layer: int) -> Callable[..., torch.Tensor]:
        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + columns[None, :, None] * delta[layer] if output.shape[1] == len(columns) else output

        return after

    with ExitStack() as stack:
        for number, layer in enumerate(plain.layers):
            stack.enter_context(layer.register_forward_hook(hook(number)))
        yield


@pytest.mark.parametrize("budget", [400, 11])
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_one_image_by_its_number_in_a_mixed_batch(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family, slots=6, prefill_budget=budget), load_plain(family)
    vector, messages = make_vector(engine.mllm), chat(family)
    delta = by_hand(vector, 3.0, (0, 2))
    one_image = chat(family, 1)
    steers = [Steer(vector, 3.0, tokens=tokens) for tokens in ("image:1", "image:2", "text", "image")]
    requests = [
        Request(messages, SAMPLING, interventions=[(steers[0],)]),
        Request(messages, SAMPLING, interventions=[(steers[1],)]),
        Request(messages, SAMPLING, interventions=[(steers[1], steers[2])]),
        Request(messages, SAMPLING, interventions=[(steers[3],)]),
        Request(messages, SAMPLING),
        Request(one_image, SAMPLING, interventions=[(steers[0],)]),
    ]
    choices = [result.choices[0] for result in engine.generate(requests)]

    columns = [image_columns(plain, messages, number) for number in (1, 2)]
    alone = image_columns(plain, one_image, 1)
    text = [(delta, "text")]
    with added_to(plain, columns[0], delta):
        answers = [plain.answer(messages, STEPS)]
    with added_to(plain, columns[1], delta):
        answers += [plain.answer(messages, STEPS), plain.answer(messages, STEPS, add=text)]
    answers += [plain.answer(messages, STEPS, add=[(delta, "image")]), plain.answer(messages, STEPS)]
    with added_to(plain, alone, delta):
        answers.append(plain.answer(one_image, STEPS))
    for choice, answer in zip(choices, answers, strict=True):
        assert_same(choice, answer)
    first = [answer.logprobs[0] for answer in answers[:5]]
    for number, one in enumerate(first):
        assert all((one - other).abs().max() > 1e-3 for other in first[number + 1 :])

    for choice, touched in ((choices[0], columns[0]), (choices[1], columns[1]), (choices[5], alone)):
        assert choice.applied is not None
        (report,) = choice.applied["steering"]
        assert report["tokens"] == int(touched.sum()) > 0
    hidden = plain.answer(messages, STEPS).hidden[0, : len(columns[1])][columns[1]]
    dose = steers[1].delta[0].norm() / hidden.norm(dim=-1).mean()
    single = Steer(vector, 3.0, layers=(0,), tokens="image:2")
    applied = engine.generate([Request(messages, SAMPLING, interventions=[(single,)])])[0].choices[0].applied
    assert applied is not None
    assert applied["steering"][0]["apply"] == {"tokens": "image:2"}
    assert applied["steering"][0]["dose"] == pytest.approx(float(dose), rel=1e-3)


def test_an_image_by_number_alone_is_an_image_in_any_batch(make_engine: MakeEngine) -> None:
    """To the last bit: that others tell images apart changes nothing for those who do not, nor the other way round."""
    engine = make_engine("qwen2_vl")
    vector = make_vector(engine.mllm)
    every = Request(chat("qwen2_vl"), SAMPLING, interventions=[(Steer(vector, 2.0, tokens="image"),)])
    second = Request(chat("qwen2_vl"), SAMPLING, interventions=[(Steer(vector, 2.0, tokens="image:2"),)])
    alone, mixed = engine.generate([every, every])[0], engine.generate([every, second])[0]
    assert alone.choices[0].logprobs == mixed.choices[0].logprobs
    assert alone.choices[0].applied == mixed.choices[0].applied


def test_a_contrast_without_the_images_leaves_the_image_alone(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    steer = Steer(make_vector(engine.mllm), 2.0, tokens="image:2")
    request = Request(
        chat("qwen2_vl"),
        SAMPLING,
        interventions=[(steer,), Pai(first_layer=0)],
    )
    assert engine.generate([request])[0].choices[0].finish_reason == "length"


@pytest.mark.parametrize("n", [1, 2])
def test_an_image_that_the_request_does_not_have_is_refused(n: int, make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    steer = Steer(make_vector(engine.mllm), 1.0, tokens="image:3")
    with pytest.raises(RequestError, match=r"'image:3', but the request holds 2 images") as refused:
        engine.submit(Request(chat("qwen2_vl"), SAMPLING, interventions=[(steer,)], n=n))
    assert refused.value.param == "steering.apply.tokens"


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [400, 11])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_next"])
def test_applied_counts_tokens_and_weighs_the_dose(
    family: str, tokens: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, prefill_budget=budget)
    vector = make_vector(engine.mllm)
    request = Request(chat(family), SAMPLING, interventions=[(Steer(vector, 1.2, tokens=tokens, toward="text"),)])
    other = Request(chat(family, 1), SAMPLING)
    choice = engine.generate([other, request])[1].choices[0]

    delta = by_hand(vector, 1.2, (0, 2))
    answer = load_plain(family).answer(chat(family), STEPS, add=[(delta, tokens)])
    image = answer.ids == engine.mllm.image_token_id
    n, fed = len(image), STEPS - 1
    counts = {
        "all": n + fed,
        "prompt": n,
        "generated": fed,
        "image": int(image.sum()),
        "text": int((~image).sum()),
    }
    # |added| / |h| over the touched tokens of the prompt; generated tokens are stood for by the prompt's text.
    weighed = {"all": image | True, "prompt": image | True, "generated": ~image, "image": image, "text": ~image}[tokens]
    doses = [delta[layer].norm() / answer.hidden[layer, :n][weighed].norm(dim=-1).mean() for layer in (0, 2)]
    assert choice.applied == {
        "steering": [
            {
                "name": "test",
                "toward": "text",
                "strength": 1.2,
                "published": None,
                "scale": 1.2,
                "layers": [0, 2],
                "apply": {"tokens": tokens},
                "tokens": counts[tokens],
                "dose": pytest.approx(float(sum(doses) / 2), rel=1e-3),
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
def test_a_warning_beyond_the_calibrated_range(scale: float, warned: bool, make_engine: MakeEngine) -> None:
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
