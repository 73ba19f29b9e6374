"""An image among several is pushed, by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from steering import (
    Pai,
    Request,
    RequestError,
    Steer,
)
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.pushes import SAMPLING, STEPS, assert_same, by_hand, chat, make_vector
from tests.steering.plain import Messages, Plain


def image_columns(plain: Plain, messages: Messages, number: int) -> torch.Tensor:
    """(n,) bool: the tokens of one image, counted from 1, by what the processor makes of each picture alone."""
    image_token = plain.model.config.image_token_id
    counts = []
    for picture in families.images_of(messages):
        parts = [{"type": "image", "image": picture}, {"type": "text", "text": "?"}]
        counts.append(int((plain.inputs([{"role": "user", "content": parts}])["input_ids"] == image_token).sum()))
    image = plain.inputs(messages)["input_ids"][0] == image_token
    assert sum(counts) == int(image.sum())
    before = image.cumsum(0) - 1
    return image & (before >= sum(counts[: number - 1])) & (before < sum(counts[:number]))


@contextmanager
def added_to(plain: Plain, columns: torch.Tensor, delta: torch.Tensor) -> Iterator[None]:
    """Add a vector to some columns of the plain model's prompt; delta: (layers, d)."""

    def hook(layer: int) -> Callable[..., torch.Tensor]:
        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + columns[None, :, None] * delta[layer] if output.shape[1] == len(columns) else output

        return after

    with ExitStack() as stack:
        for number, layer in enumerate(plain.layers):
            stack.enter_context(layer.register_forward_hook(hook(number)))
        yield


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "gemma3"])
def test_one_image_is_steered_by_number_in_a_mixed_batch(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family, slots=6, prefill_budget=400), load_plain(family)
    in_pieces = make_engine(family, slots=6, prefill_budget=11)
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
    choices, cut = (
        [result.choices[0] for result in engine_of_kind.generate(requests)] for engine_of_kind in (engine, in_pieces)
    )

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
    for choice, pieced, answer in zip(choices, cut, answers, strict=True):
        assert_same(choice, answer)
        assert_same(pieced, answer)
    first = [answer.logprobs[0] for answer in answers[:5]]
    for number, row in enumerate(first):
        assert all((row - later).abs().max() > 1e-3 for later in first[number + 1 :])

    for number, touched in ((0, columns[0]), (1, columns[1]), (5, alone)):
        for choice in (choices[number], cut[number]):
            assert choice.applied is not None
            (report,) = choice.applied["steering"]
            assert report["tokens"] == int(touched.sum()) > 0
    hidden = answers[4].hidden[0, : len(columns[1])][columns[1]]
    dose = (steers[1].delta[0].norm() / hidden.norm(dim=-1)).mean()
    single = Steer(vector, 3.0, layers=(0,), tokens="image:2")
    for engine_of_kind in (engine, in_pieces):
        applied = (
            engine_of_kind.generate([Request(messages, SAMPLING, interventions=[(single,)])])[0].choices[0].applied
        )
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
