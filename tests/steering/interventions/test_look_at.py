"""A bias on the scores of a picture's patches, against eager attention in plain transformers with the bias added by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.interventions.look_at import LookAt
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.pushes import chat
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    assert_chosen_by,
    logprobs_along,
    only,
    rounding,
    scores_changed,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.interventions.test_steer_image import image_columns
from tests.steering.plain import Messages, Plain

FAMILIES = ("qwen2_vl", "qwen3_vl_moe", "qwen3_5", "llava", "gemma3", "paligemma2", "gpt_oss")


def biased(
    plain: Plain, patches: torch.Tensor, bias: float, layers: list[int], heads: list[int] | None = None, first: int = -1
) -> AbstractContextManager[None]:
    """Bias the plain model toward `patches` (n,) bool of the prompt; `first`: the first query, by default behind these."""
    first = int(patches.nonzero().max()) + 1 if first < 0 else first

    def change(layer: int, scores: torch.Tensor, start: int) -> torch.Tensor:
        if layer not in layers:
            return scores
        out = scores.clone()
        queries = torch.arange(scores.shape[1]) + start >= first
        columns = torch.arange(scores.shape[2]) + start + scores.shape[1] - scores.shape[2]  # a window keeps the latest
        at = torch.cat([patches, torch.zeros(len(columns), dtype=torch.bool)])[columns]
        for head in range(scores.shape[0]) if heads is None else heads:
            out[head] += bias * (queries[:, None] & at[None])
        return out

    return scores_changed(plain, change)


def third(plain: Plain) -> list[int]:
    """Return the layers of the middle third of those that attend."""
    count = len(plain.attending)
    return plain.attending[count // 3 : max(count // 3 + 1, 2 * count // 3)]


@pytest.mark.parametrize(
    ("bias", "family"),
    [*((3.0, family) for family in FAMILIES), (-20.0, "qwen2_vl"), (-20.0, "gemma3"), (-20.0, "gpt_oss")],
)
def test_the_whole_picture_is_exact_in_every_family(
    family: str, bias: float, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    plain, messages = load_plain(family), chat(family, 1)
    patches = image_columns(plain, messages, 1)
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        choice = only(engine, messages, LookAt(bias=bias))
        with biased(plain, patches, bias, third(plain)):
            assert_chosen_by(choice, logprobs_along(plain, messages, choice.token_ids))


def test_layers_that_do_not_attend_are_not_among_the_default(tmp_path: Path) -> None:
    folder = families.build("qwen3_5", tmp_path, text={"full_attention_interval": 4})
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=2, max_length=512, self_check=False)
    plain, messages = Plain(folder), chat("qwen3_5", 1)
    choice = only(engine, messages, LookAt(bias=3.0))
    with biased(plain, image_columns(plain, messages, 1), 3.0, [3]):
        assert_chosen_by(choice, logprobs_along(plain, messages, choice.token_ids))
    assert choice.applied is not None
    assert choice.applied["look_at"]["layers"] == [3]


@pytest.mark.parametrize(
    ("options", "layers", "heads", "first"),
    [
        (LookAt(bias=2.5, layers=[0, 2]), [0, 2], None, -1),
        (LookAt(bias=2.5, heads=[1, 3]), None, [1, 3], -1),
        (LookAt(bias=-4.0, layers=[0, 1, 2], queries="all"), [0, 1, 2], None, 0),
        (LookAt(bias=20.0, layers=[1], heads=[0], queries="all"), [1], [0], 0),
    ],
)
def test_layers_heads_and_queries_are_exact(
    options: LookAt,
    layers: list[int] | None,
    heads: list[int] | None,
    first: int,
    make_engine: MakeEngine,
    load_plain: LoadPlain,
) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    for number in (1, 2):
        choice = only(engine, chat("qwen2_vl"), options.model_copy(update={"image": number}))
        patches = image_columns(plain, chat("qwen2_vl"), number)
        with biased(plain, patches, options.bias, layers or third(plain), heads, first):
            assert_chosen_by(choice, logprobs_along(plain, chat("qwen2_vl"), choice.token_ids))


def test_a_box_is_the_patches_that_it_overlaps(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    messages = chat("qwen2_vl")
    columns = image_columns(plain, messages, 1).nonzero()[:, 0]
    rows, across = engine_grid(engine, messages)
    assert rows * across == len(columns)
    assert min(rows, across) > 1
    boxes = {
        (0.0, 0.0, 1.0, 1.0): [(r, c) for r in range(rows) for c in range(across)],
        (0.0, 0.0, 0.01, 0.01): [(0, 0)],
        (0.99, 0.99, 1.0, 1.0): [(rows - 1, across - 1)],
        (0.0, 0.0, 1.0, 1 / rows): [(0, c) for c in range(across)],
        (0.0, 0.0, 0.5 / across, 1.0): [(r, 0) for r in range(rows)],
    }
    for box, places in boxes.items():
        choice = only(engine, messages, LookAt(bias=4.0, box=list(box)))
        patches = torch.zeros(len(image_columns(plain, messages, 1)), dtype=torch.bool)
        patches[[int(columns[r * across + c]) for r, c in places]] = True
        first = int(columns.max()) + 1
        with biased(plain, patches, 4.0, third(plain), first=first):
            assert_chosen_by(choice, logprobs_along(plain, messages, choice.token_ids))
        assert choice.applied is not None
        assert choice.applied["look_at"]["patches"] == len(places)


def engine_grid(engine: steering.Engine, messages: Messages) -> tuple[int, int]:
    """Rows and columns of the first picture's tokens, by the processor's own count of patches."""
    inputs = Plain.inputs(_Processor(engine), messages)  # type: ignore[arg-type]
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    merged = engine.mllm.model.config.vision_config.spatial_merge_size
    return rows // merged, columns // merged


class _Processor:
    """A stand-in for a plain model with all that `Plain.inputs` needs."""

    def __init__(self, engine: steering.Engine):
        self.processor, self.tokenizer = engine.mllm.processor, engine.mllm.tokenizer


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_a_mixed_batch_is_exact_and_neighbours_keep_every_bit(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family), load_plain(family)
    messages, other_chat = chat(family, 1), families.example_messages(family, 1, text="How many?")

    def answers(*options: Any) -> list[steering.Choice]:
        requests = [
            steering.Request(messages, SAMPLING, options[0]),
            steering.Request(other_chat, SAMPLING),
            steering.Request(other_chat, SAMPLING, options[1]),
        ]
        return [result.choices[0] for result in engine.generate(requests)]

    plainly = answers((), ())
    first, beside, third_one = answers((LookAt(bias=5.0, layers=[0]),), (LookAt(bias=-3.0, layers=[1, 2]),))
    assert beside.logprobs == plainly[1].logprobs
    for choice, chat_of_choice, bias, layers in ((first, messages, 5.0, [0]), (third_one, other_chat, -3.0, [1, 2])):
        with biased(plain, image_columns(plain, chat_of_choice, 1), bias, layers):
            assert_chosen_by(choice, logprobs_along(plain, chat_of_choice, choice.token_ids))


def test_a_bias_of_zero_is_exactly_off(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    off, zero = only(engine, chat("qwen2_vl")), only(engine, chat("qwen2_vl"), LookAt(bias=0.0))
    assert zero.logprobs == off.logprobs


@pytest.mark.parametrize("other", [steering.See(alpha=0.6, shallow=2), steering.Pai(), steering.Vcd()])
def test_prefill_and_decode_agree_with_other_interventions(other: steering.Options, make_engine: MakeEngine) -> None:
    """An answer's tokens say the same as part of the prompt: what a prefill does to its rows is what decoding did."""
    engine, look = make_engine("llava"), LookAt(bias=2.0, layers=[0, 1, 2])
    plain, beside = (only(engine, chat("llava"), *options) for options in ((other,), (other, look)))
    assert beside.logprobs != plain.logprobs
    pieces = only(make_engine("llava", prefill_budget=7), chat("llava"), other, look)
    assert pieces.token_ids == beside.token_ids
    for token, two in zip(pieces.logprobs or (), beside.logprobs or (), strict=True):
        assert token.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_prefill_composes_look_at_with_see_as_decode_does(make_engine: MakeEngine) -> None:
    """See moves weights of the biased softmax, whatever the order of the two in the request.

    The tokens of a reply, which a prefill reads, are as likely as the same tokens generated.
    """
    engine, text = make_engine("qwen2_vl"), "The star is red, and so is the ball."
    every = list(range(engine.mllm.num_layers))
    options = (steering.See(alpha=0.9, shallow=len(every), spans="content"), LookAt(bias=3.0, layers=every))
    short = steering.Sampling(max_tokens=1)
    (read,) = engine.generate([steering.Request(chat("qwen2_vl"), short, options, reply=text)])[0].choices
    spoken = steering.Sampling(logprobs=0)
    (generated,) = engine.generate([steering.Request(chat("qwen2_vl"), spoken, options, forced=text)])[0].choices
    scores = torch.tensor([step.logprob for step in generated.logprobs or ()])
    assert len(scores) > 5
    assert read.reply_logprobs is not None
    torch.testing.assert_close(read.reply_logprobs[: len(scores)], scores, rtol=0, atol=1e-4)


def test_see_acts_on_the_biased_weights(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """In prefill and decode alike, See's scaling is of the biased softmax: both together are a bias on the same columns."""
    engine, plain, messages = make_engine("llava"), load_plain("llava"), chat("llava", 1)
    alpha, every = 0.7, [0, 1, 2]
    see = steering.See(alpha=alpha, reading="scale", shallow=3)
    choice = only(engine, messages, see, LookAt(bias=1.5, layers=every, queries="all"))
    with biased(plain, image_columns(plain, messages, 1), 1.5 + math.log(1 + alpha), every, first=0):
        assert_chosen_by(choice, logprobs_along(plain, messages, choice.token_ids))


def test_answers_are_equal_for_copies_baselines_and_cached_prompts(make_engine: MakeEngine) -> None:
    messages = families.example_messages("qwen2_vl", 1, text="How many? " * 20)
    engine, look = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**24), LookAt(bias=4.0)
    plain = only(make_engine("qwen2_vl"), messages)
    alone = only(make_engine("qwen2_vl"), messages, look)
    engine.generate([steering.Request(messages, SAMPLING)])
    assert engine.generate([steering.Request(messages, SAMPLING, look)])[0].cached_tokens == 0
    result = engine.generate([steering.Request(messages, SAMPLING, look, n=2, baseline=True)])[0]
    assert result.cached_tokens > 0
    for choice in result.choices:
        assert choice.token_ids == alone.token_ids
        assert choice.baseline is not None
        assert choice.baseline.token_ids == plain.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages = chat("qwen2_vl")
    choice = only(engine, messages, LookAt(bias=3.0))
    answers = []
    for plain in (load_plain("qwen2_vl"), half):
        with biased(plain, image_columns(plain, messages, 1), 3.0, third(plain)):
            answers.append(logprobs_along(plain, messages, choice.token_ids))
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: LookAt(bias=21), "look_at.bias"),
        (lambda: LookAt(image=0), "look_at.image"),
        (lambda: LookAt(box=[0, 0, 1]), "look_at.box"),
        (lambda: LookAt(box=[0, 0, 1, 2]), "look_at.box[3]"),
        (lambda: LookAt(queries="some"), "look_at.queries"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


@pytest.mark.parametrize(
    ("family", "options", "param"),
    [
        ("qwen2_vl", LookAt(image=3), "look_at.image"),
        ("qwen2_vl", LookAt(box=[0.5, 0, 0.5, 1]), "look_at.box"),
        ("qwen2_vl", LookAt(layers=[7]), "look_at.layers"),
        ("qwen2_vl", LookAt(heads=[64]), "look_at.heads"),
        ("qwen2_vl", LookAt(heads=[1, 1]), "look_at.heads"),
        ("idefics3", LookAt(box=[0, 0, 1, 1]), "look_at.box"),
    ],
)
def test_unsuitable_options_are_refused(family: str, options: LookAt, param: str, make_engine: MakeEngine) -> None:
    with pytest.raises(steering.RequestError) as refused:
        only(make_engine(family), chat(family), options)
    assert refused.value.param == param
