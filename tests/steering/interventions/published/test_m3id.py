"""M3ID against two plain runs that share nothing, by the paper's formula for each token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import steering
from steering.interventions.published.m3id import M3id
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.published.twins import Combine, check_mixed, combined_along, cut
from tests.steering.interventions.pushes import chat
from tests.steering.interventions.references import (
    assert_as_near_as_plain,
    assert_chosen_by,
    only,
    rounding,
    states_along,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain

STRONG = M3id(forgetting=0.3, threshold=1.0)
"""Tiny models are unsure of everything, and the twin must matter within a few tokens."""


def by_definition(options: M3id) -> Combine:
    """Algorithm 1 of the paper, with the readings that the options select."""

    def combine(step: int, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        gamma = math.exp(-options.forgetting * (step + options.first_step))
        unsure = options.threshold == 1 or float(ours.log_softmax(-1).max()) < math.log(options.threshold)
        moved = ours + (1 - gamma) / gamma * (ours - theirs) if unsure else ours
        return cut(moved, ours, options.beta)

    return combine


def check(choice: steering.Choice, plain: Plain, family: str, messages: Messages, options: M3id) -> None:
    full, text = plain.inputs(messages), plain.inputs(families.example_messages(family, 0))
    expected, changed = combined_along(plain, full, text, choice.token_ids, by_definition(options))
    assert_chosen_by(choice, expected)
    assert choice.applied is not None
    assert choice.applied["contrast"] == {**options.settings(), "changed": changed}


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v"])
def test_m3id_equals_two_plain_runs(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    messages = families.example_messages(family, 2)
    check(only(make_engine(family), messages, STRONG), load_plain(family), family, messages, STRONG)


@pytest.mark.parametrize(
    "options",
    [
        M3id(forgetting=0.3, threshold=1.0, first_step=0),
        M3id(forgetting=0.3, threshold=1.0, first_step=0, beta=0.5),
        M3id(forgetting=0.3, threshold=1e-6),
        M3id(forgetting=0.0, threshold=1.0),
        M3id(),
    ],
)
def test_every_reading_is_exact(options: M3id, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    messages = families.example_messages("qwen2_vl", 1)
    choice = only(make_engine("qwen2_vl"), messages, options)
    check(choice, load_plain("qwen2_vl"), "qwen2_vl", messages, options)


def test_the_twin_counts_only_where_the_model_is_unsure(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    forced = (7, 8, 9, 10)
    logits, _ = states_along(plain, messages, forced)
    sure = sorted(float(row.softmax(-1).max()) for row in logits)
    options = M3id(forgetting=0.3, threshold=(sure[1] + sure[2]) / 2)
    choice = only(engine, messages, options, forced=forced)
    full, text = plain.inputs(messages), plain.inputs(families.example_messages("qwen2_vl", 0))
    expected, _ = combined_along(plain, full, text, forced, by_definition(options))
    moved = 0
    for step, (token, row) in enumerate(zip(forced, expected, strict=True)):
        assert choice.logprobs is not None
        assert choice.logprobs[step].logprob == pytest.approx(float(row[token]), abs=1e-4)
        moved += abs(float(row[token]) - float(logits[step].log_softmax(-1)[token])) > 1e-2
    assert moved == 2


def test_the_weight_grows_along_the_answer_up_to_a_bound(make_engine: MakeEngine) -> None:
    """A weight of e^60 leaves no token beside the one that gains most."""
    choice = only(make_engine("qwen2_vl"), chat("qwen2_vl"), M3id(forgetting=1.0, threshold=1.0), forced=(5,) * 90)
    assert choice.logprobs is not None
    assert all(math.isfinite(alternative.logprob) for alternative in choice.logprobs[-1].top[:1])
    assert choice.logprobs[-1].top[0].logprob == pytest.approx(0)
    assert choice.logprobs[0].top[0].logprob < -1e-3


def test_rows_of_one_batch_have_their_own_weights(make_engine: MakeEngine) -> None:
    messages = chat("qwen2_vl")
    check_mixed(
        make_engine("qwen2_vl", slots=12),
        [
            (messages, (STRONG,)),
            (messages, ()),
            (families.example_messages("qwen2_vl", 1, text="How many?"), (M3id(forgetting=0.4, threshold=0.0095),)),
            (messages, (steering.Vcd(),)),
            (messages, (steering.Sage(generate=steering.Generate()),)),
            (messages, (M3id(first_step=0, forgetting=0.3, threshold=1.0, beta=0.2), steering.See(alpha=0.4))),
        ],
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, text = chat("qwen2_vl"), families.example_messages("qwen2_vl", 0)
    choice = only(engine, messages, STRONG)
    answers = [
        combined_along(plain, plain.inputs(messages), plain.inputs(text), choice.token_ids, by_definition(STRONG))[0]
        for plain in (load_plain("qwen2_vl"), half)
    ]
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: M3id(forgetting=-1), "contrast.forgetting"),
        (lambda: M3id(threshold=0.0), "contrast.threshold"),
        (lambda: M3id(first_step=2), "contrast.first_step"),
        (lambda: M3id(alpha=1.0), "contrast.alpha"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


def test_a_prompt_without_a_picture_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(steering.RequestError, match="m3id needs an image"):
        only(make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 0), M3id())
