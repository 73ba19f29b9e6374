"""ONLY against the authors' steps, written anew over what plain transformers return, a head and a token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.interventions.dola import Dola
from steering.interventions.published.only import Only
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.published.twins import check_mixed, cut
from tests.steering.interventions.pushes import chat
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    assert_chosen_by,
    only,
    rounding,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain, uncached

FAMILIES = ("qwen2_vl", "qwen3_vl", "llava", "gpt_oss")


def peaks_removed(weights: list[float]) -> list[float]:
    mean = sum(weights) / len(weights)
    deviation = math.sqrt(sum((weight - mean) ** 2 for weight in weights) / (len(weights) - 1))
    return [0.0 if weight > mean + deviation else weight for weight in weights]


def entropy(weights: list[float]) -> float:
    total = sum(weights)
    return -sum(weight / total * math.log(weight / total + 1e-6) for weight in weights)


@torch.inference_mode()
def by_definition(
    plain: Plain, messages: Messages, tokens: Sequence[int], options: Only
) -> tuple[torch.Tensor, dict[str, int]]:
    """Log-probabilities (tokens, vocabulary) along an answer, and how often logits were added, subtracted and changed."""
    inputs = plain.inputs(messages)
    image_token = plain.model.config.image_token_id
    head, norm = plain.model.get_output_embeddings(), plain.model.get_decoder().norm
    rows, counts = [], {"collaborative": 0, "contrastive": 0, "changed": 0}
    for step in range(len(tokens)):
        out = uncached(plain.model, inputs, tokens[:step], output_attentions=True, output_hidden_states=True)
        ids = [*inputs["input_ids"][0].tolist(), *tokens[:step]]
        images = [column for column, token in enumerate(ids) if token == image_token]
        text = [column for column in range(1, len(ids)) if column not in images]
        attention = out.attentions[options.layer][0, :, -1].float()  # (heads, columns)
        layer = plain.layers[options.layer]
        values = layer.self_attn.v_proj(layer.input_layernorm(out.hidden_states[options.layer]))[0]  # (columns, ...)
        ratios, kept = [], attention.clone()
        for number, weights in enumerate(attention):
            lower_text = peaks_removed(weights[text].tolist())
            lower_images = peaks_removed(weights[images].tolist())
            kept[number, text], kept[number, images] = torch.tensor(lower_text), torch.tensor(lower_images)
            ratios.append(entropy(lower_text) / entropy(lower_images))
        mean = sum(ratios) / len(ratios)
        width = layer.self_attn.head_dim
        values = values.view(len(ids), -1, width)
        group = len(ratios) // values.shape[1]
        parts = [
            kept[number].to(values.dtype) @ values[:, number // group] * float(ratio >= mean)
            for number, ratio in enumerate(ratios)
        ]
        state = layer.self_attn.o_proj(torch.cat(parts))
        last = plain.layers[-1]
        if options.layer < len(plain.layers) - 1:
            residual = 0.2 * out.hidden_states[len(plain.layers) - 1][0, -1] + last.input_layernorm(state)
            ffn = last.mlp(last.post_attention_layernorm(residual)[None, None])
            state = residual + (ffn[0] if isinstance(ffn, tuple) else ffn)[0, 0]
        textual = head(norm(state) + 0.5 * out.hidden_states[-1][0, -1]).double()
        full = out.logits[0, -1].double()
        if float((full.softmax(-1) - textual.softmax(-1)).abs().sum()) < options.gamma:
            counts["collaborative"] += 1
            combined = full + options.collaborate * textual
        else:
            counts["contrastive"] += 1
            combined = (1 + options.contrast) * full - options.contrast * textual
        combined = cut(combined, full, options.beta)
        counts["changed"] += int(combined.argmax()) != int(full.argmax())
        rows.append(combined.log_softmax(-1).float())
    return torch.stack(rows), counts


def check(choice: steering.Choice, plain: Plain, messages: Messages, options: Only) -> dict[str, int]:
    expected, counts = by_definition(plain, messages, choice.token_ids, options)
    assert_chosen_by(choice, expected, atol=2e-4)
    assert choice.applied is not None
    assert choice.applied["only"] == {**options.settings(), **counts}
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_only_is_exact_in_families_like_llama(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    plain, messages = load_plain(family), chat(family, 2)
    options = Only(layer=1 if family == "gpt_oss" else 0)  # whose first layer has a window that holds no picture
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        check(only(engine, messages, options), plain, messages, options)


@pytest.mark.parametrize(
    "options",
    [
        Only(layer=1),
        Only(layer=2),
        Only(gamma=0.0, contrast=2.0, beta=0.0),
        Only(gamma=2.0, collaborate=1.5, beta=0.6),
        Only(gamma=2.0, collaborate=0.0, beta=0.0),
    ],
)
def test_every_option_is_exact(options: Only, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    plain = load_plain("qwen2_vl")
    assert len(plain.layers) == 3
    counts = check(only(make_engine("qwen2_vl"), chat("qwen2_vl"), options), plain, chat("qwen2_vl"), options)
    if options.gamma in (0.0, 2.0):
        assert counts["contrastive" if options.gamma else "collaborative"] == 0


def test_rows_of_one_batch_have_their_own_layers(make_engine: MakeEngine) -> None:
    messages, other = chat("qwen2_vl"), families.example_messages("qwen2_vl", 1, text="How many?")
    check_mixed(
        make_engine("qwen2_vl", slots=12),
        [
            (messages, (Only(),)),
            (messages, ()),
            (other, (Only(layer=2, gamma=0.0),)),
            (other, (steering.Vcd(),)),
            (other, (Only(layer=1, gamma=2.0, beta=0.4), steering.See(alpha=0.4))),
            (messages, (Only(), steering.Icd(), Dola(premature=[0, 1]))),
            (messages, (steering.Pai(first_layer=1),)),
        ],
    )


def test_neighbours_keep_every_bit(make_engine: MakeEngine) -> None:
    engine, messages = make_engine("qwen2_vl"), chat("qwen2_vl")

    def beside(*asked: Any) -> steering.Choice:
        requests = [steering.Request(messages, SAMPLING, interventions) for interventions in (asked, ())]
        return engine.generate(requests)[1].choices[0]

    assert beside(Only()).logprobs == beside().logprobs


def test_copied_and_cached_prompts_give_the_same_answers(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    messages = families.example_messages("qwen2_vl", 1, text="How many? " * 20)
    engine, plain = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**24), load_plain("qwen2_vl")
    engine.generate([steering.Request(messages, SAMPLING)])
    result = engine.generate([steering.Request(messages, SAMPLING, Only(), n=2)])[0]
    assert result.cached_tokens > 0
    for choice in result.choices:
        check(choice, plain, messages, Only())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, options = chat("qwen2_vl"), Only(gamma=2.0, beta=0.0)
    choice = only(engine, messages, options)
    answers = [by_definition(plain, messages, choice.token_ids, options)[0] for plain in (load_plain("qwen2_vl"), half)]
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Only(layer=-1), "only.layer"),
        (lambda: Only(gamma=2.5), "only.gamma"),
        (lambda: Only(collaborate=-1), "only.collaborate"),
        (lambda: Only(beta=1.5), "only.beta"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


def test_models_of_another_build_are_refused(make_engine: MakeEngine) -> None:
    for family, options, param in (
        ("gemma3", Only(), "only"),
        ("qwen2_vl", Only(layer=3), "only.layer"),
    ):
        with pytest.raises(steering.RequestError) as refused:
            only(make_engine(family), chat(family), options)
        assert refused.value.param == param
    with pytest.raises(steering.RequestError, match="'only' needs an image"):
        only(make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 0), Only())
