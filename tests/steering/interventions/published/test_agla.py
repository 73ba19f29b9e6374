"""AGLA against two plain runs that share nothing; its mask by hand from plain attention weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.interventions.published.agla import Agla, least_salient
from steering.prompt.layout import build_prompt
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain, MakeEngine
from tests.steering.interventions.published.twins import check_mixed, combined_along, cut
from tests.steering.interventions.pushes import chat
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    assert_chosen_by,
    logprobs_along,
    occluded,
    only,
    rounding,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain, uncached


@torch.inference_mode()
def by_definition(
    plain: Plain, mllm: steering.MLLM, messages: Messages, tokens: Sequence[int], options: Agla
) -> tuple[torch.Tensor, int, list[list[int]]]:
    """Log-probabilities (tokens, vocabulary) along an answer, how many tokens changed, and the masked patches."""
    inputs, images = plain.inputs(messages), build_prompt(mllm, messages).layout.images
    out = uncached(plain.model, inputs, [], output_attentions=True)
    attention = torch.stack([layer[0, :, -1].mean(0) for layer in out.attentions[-mllm.focus_layers :]]).mean(0)
    masked = []
    for image in images:
        values = attention[image.columns].tolist()
        order = sorted(range(len(values)), key=lambda patch: -values[patch])
        masked.append(sorted(order[max(1, round(options.keep * len(values))) :]))
    processor = plain.processor.image_processor
    black = [-mean / deviation for mean, deviation in zip(processor.image_mean, processor.image_std, strict=True)]
    local = occluded(inputs, [image.grid for image in images], masked, black)

    def combine(step: int, full: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        return cut(full + options.alpha * twin, full, options.beta)

    return *combined_along(plain, inputs, local, tokens, combine), masked


def check(choice: steering.Choice, plain: Plain, mllm: steering.MLLM, messages: Messages, options: Agla) -> None:
    expected, changed, masked = by_definition(plain, mllm, messages, choice.token_ids, options)
    assert_chosen_by(choice, expected, atol=2e-4)
    assert choice.applied is not None
    assert choice.applied["contrast"] == {
        **options.settings(), "changed": changed, "saliency": "attention", "masked": masked,
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v"])
def test_agla_equals_two_plain_runs(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    messages, options = families.example_messages(family, 2), Agla(alpha=1.0, beta=0.2, keep=0.6)
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        check(only(engine, messages, options), load_plain(family), load_mllm(family), messages, options)


@pytest.mark.parametrize("options", [Agla(), Agla(alpha=0.0, beta=0.0), Agla(keep=1.0, beta=0.0), Agla(keep=0.01)])
def test_every_option_is_exact(
    options: Agla, make_engine: MakeEngine, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    messages = families.example_messages("qwen2_vl", 1)
    choice = only(make_engine("qwen2_vl"), messages, options)
    check(choice, load_plain("qwen2_vl"), load_mllm("qwen2_vl"), messages, options)


def test_the_twin_keeps_its_states_where_the_authors_loop_loses_them(
    make_engine: MakeEngine, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    """There the twin has the row's own cache from the second token on, so that its logits are the row's."""
    messages, options, plain = families.example_messages("llava", 1), Agla(beta=0.0, keep=0.3), load_plain("llava")
    choice = only(make_engine("llava"), messages, options)
    expected, _, _ = by_definition(plain, load_mllm("llava"), messages, choice.token_ids, options)
    assert_chosen_by(choice, expected, atol=2e-4)
    lost = ((1 + options.alpha) * logprobs_along(plain, messages, choice.token_ids)).log_softmax(-1)
    assert float((expected - lost)[1:].abs().amax(1).min()) > 0.1


def test_a_tiled_image_is_masked_in_its_features(make_engine: MakeEngine) -> None:
    choice = only(make_engine("idefics3"), families.example_messages("idefics3", 1), Agla(keep=0.5))
    assert choice.applied is not None
    assert len(choice.applied["contrast"]["masked"][0]) > 0


def test_rows_of_one_batch_have_their_own_masks(make_engine: MakeEngine) -> None:
    messages, other = chat("qwen2_vl"), families.example_messages("qwen2_vl", 1, text="How many?")
    check_mixed(
        make_engine("qwen2_vl", slots=14),
        [
            (messages, (Agla(beta=0.1),)),
            (messages, ()),
            (other, (Agla(keep=0.3, alpha=0.5, beta=0.0),)),
            (other, (steering.Vcd(),)),
            (messages, (steering.Icd(form="paper", alpha=0.5),)),
            (other, (Agla(beta=0.2), steering.See(alpha=0.4))),
        ],
    )


def test_copied_and_cached_prompts_give_the_same_answers(
    make_engine: MakeEngine, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    messages, options = families.example_messages("qwen2_vl", 1, text="How many? " * 20), Agla(beta=0.1)
    engine = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**24)
    engine.generate([steering.Request(messages, SAMPLING)])
    result = engine.generate([steering.Request(messages, SAMPLING, options, n=2)])[0]
    for choice in result.choices:
        check(choice, load_plain("qwen2_vl"), load_mllm("qwen2_vl"), messages, options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(
    dtype: str, root: Path, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, options = chat("qwen2_vl"), Agla(beta=0.0, keep=0.5)
    choice = only(engine, messages, options)
    half_inputs: Any = half.inputs

    def inputs(chat: Messages) -> dict[str, torch.Tensor]:
        given: dict[str, torch.Tensor] = half_inputs(chat)
        return given | {"pixel_values": given["pixel_values"].to(getattr(torch, dtype))}

    half.inputs = inputs  # type: ignore[method-assign]
    answers = [
        by_definition(plain, load_mllm("qwen2_vl"), messages, choice.token_ids, options)[0]
        for plain in (load_plain("qwen2_vl"), half)
    ]
    assert_as_near_as_plain(choice, *answers)


def test_the_least_salient_patches_are_masked() -> None:
    saliency = torch.tensor([0.3, 0.1, 0.4, 0.1, 0.2])
    assert least_salient(saliency, 0.6).tolist() == [False, True, False, True, False]
    assert least_salient(saliency, 0.01).tolist() == [True, True, False, True, True]
    assert not least_salient(saliency, 1.0).any()


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Agla(keep=0), "contrast.keep"),
        (lambda: Agla(alpha=-1), "contrast.alpha"),
        (lambda: Agla(beta=2), "contrast.beta"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)
