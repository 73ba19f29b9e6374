"""The vector against numpy, against numbers by hand, and against plain transformers on a tiny random model."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

import steering
from probes import mc2
from probes.build import Moments, build, measure
from steering.processor import load_processor
from tests import families
from tests.probes.conftest import make_samples


def test_running_moments_equal_numpy() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (50, 4, 5))
    moments = Moments()
    for value in values:
        moments.add(torch.from_numpy(value))
    np.testing.assert_allclose(moments.mean.numpy(), values.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.std.numpy(), values.std(0), rtol=1e-12)


def test_moments_do_not_cancel_far_from_zero() -> None:
    moments = Moments()
    for value in (1e9 + 1, 1e9 + 2, 1e9 + 3):
        moments.add(torch.tensor(value, dtype=torch.float64))
    assert float(moments.std) == pytest.approx((2 / 3) ** 0.5, rel=1e-6)


def test_moments_without_values_are_an_error() -> None:
    with pytest.raises(ValueError, match="No value"):
        _ = Moments().mean


def test_direction_weight_and_score_by_hand() -> None:
    # One layer of two dimensions, two queries: v = (2, -4) and (4, -2), |v| per query 3 and 3.
    # The second layer has v = (1, 1) and (3, 3), |v| per query 1 and 3: mean 2, deviation 1.
    pairs = [
        (torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([[1.0, 5.0], [1.0, 1.0]])),
        (torch.tensor([[5.0, 1.0], [4.0, 4.0]]), torch.tensor([[1.0, 3.0], [1.0, 1.0]])),
    ]
    direction = measure(pairs)
    assert direction.queries == 2
    assert direction.v.tolist() == [[3.0, -3.0], [2.0, 2.0]]
    assert direction.mean_abs.tolist() == [3.0, 2.0]
    assert direction.std.tolist() == [0.0, 1.0]
    # mean |h|: layer 0 has 3 1 1 5 5 1 1 3 = 20 / 8, layer 1 has 2 2 1 1 4 4 1 1 = 16 / 8.
    assert direction.state.tolist() == [2.5, 2.0]
    assert direction.weight.tolist() == pytest.approx([2.5 / 3, 1.0])
    assert direction.score[1].item() == pytest.approx(2.0)
    assert direction.ranking() == [0, 1]
    assert direction.ranking([1]) == [1]


def test_queries_that_disagree_rank_last() -> None:
    steady = torch.tensor([1.0, 0.0])
    pairs = [(torch.stack([steady * (1 + 0.5 * sign), steady * sign * 9]), torch.zeros(2, 2)) for sign in (1.0, -1.0)]
    direction = measure(pairs)
    assert direction.agreement.tolist() == pytest.approx([1.0, 0.0])
    assert direction.score[1] > direction.score[0]
    assert direction.ranking() == [0, 1]


def test_a_layer_without_any_difference_has_weight_and_score_zero() -> None:
    states = torch.ones(1, 3)
    direction = measure([(states, states)])
    assert direction.weight.tolist() == [0.0]
    assert direction.score.tolist() == [0.0]


def _plain_states(folder: Path, prompts: list[tuple[mc2.Sample, mc2.Setting, bool]]) -> torch.Tensor:
    """(prompts, layers, d) last-token states after every layer, by transformers alone, one prompt at a time."""
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
    processor = load_processor(folder)
    last_layer: list[torch.Tensor] = []
    # output_hidden_states gives the last layer after the final norm; a hook sees it before.
    handle = (
        model.get_decoder().layers[-1].register_forward_hook(lambda module, args, output: last_layer.append(output))
    )
    rows = []
    for sample, setting, swapped in prompts:
        chat = mc2.messages(sample, setting, swapped)
        inputs = processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        rows.append(torch.stack([layer[0, -1] for layer in [*hidden[1:-1], last_layer.pop()]]))
    handle.remove()
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_vector_equals_plain_transformers(root: Path, family: str) -> None:
    folder = families.checkpoint(family, root)
    samples = make_samples(4)
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=3, max_length=512)
    vector = build(engine, samples, seed=5, quiet=True)

    rng = random.Random(5)  # the seed decides which option comes first, sample by sample
    orders = [rng.random() < 0.5 for _ in samples]
    text, vision = (
        _plain_states(folder, [(sample, setting, swapped) for sample, swapped in zip(samples, orders, strict=True)])
        for setting in ("text", "vision")
    )
    difference = (text - vision).double()
    per_query = difference.abs().mean(-1)
    state = torch.cat([text, vision]).double().abs().mean((0, 2))
    scale = float(state.max())
    torch.testing.assert_close(vector.direction.double(), difference.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.mean_abs.double(), per_query.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.std.double(), per_query.std(0, correction=0), atol=1e-5 * scale, rtol=0)
    # Gemma's first layer has a sliding window that ends before the instruction: no direction, no weight.
    present = per_query.mean(0) > 1e-5 * state
    weight = torch.where(present, state / per_query.mean(0), 0.0)
    torch.testing.assert_close(vector.weight.double(), weight, atol=0, rtol=1e-3)
    assert present.tolist() == [family != "gemma3", True, True]
    assert vector.fingerprint == engine.mllm.fingerprint


def test_metadata_tells_how_the_vector_was_made(tiny: steering.Engine) -> None:
    samples = make_samples(3)
    vector = build(tiny, samples, name="mine", layers=[1], seed=2, quiet=True)
    assert vector.name == "mine"
    assert vector.layers == (1,)
    info = vector.info
    assert (info["samples"], info["tasks"], info["seed"]) == (3, ["color", "shape"], 2)
    assert set(info["versions"]) == {"helmsight", "torch", "transformers"}
    assert steering.SteeringVector.from_bytes(vector.to_bytes()).info == info


def test_the_data_hash_changes_with_prompts_and_pictures(tiny: steering.Engine) -> None:
    def digest(samples: list[mc2.Sample]) -> str:
        return str(build(tiny, samples, quiet=True).info["data_sha256"])

    assert digest(make_samples(2)) == digest(make_samples(2))
    assert digest(make_samples(2)) != digest(make_samples(2, question="Which color?"))
    assert digest(make_samples(2)) != digest(make_samples(2, shade=9))


def test_an_unreliable_direction_is_said(tiny: steering.Engine, caplog: pytest.LogCaptureFixture) -> None:
    from probes import build as module

    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RELIABLE", 1.1)
        vector = build(tiny, make_samples(2), quiet=True)
    assert vector.info["reliable"] is False
    assert "No reliable direction" in caplog.text


def test_wrong_options_are_named(tiny: steering.Engine) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        build(tiny, [], quiet=True)
    with pytest.raises(ValueError, match=r"layer numbers from 0 to 2; got \[7\]"):
        build(tiny, make_samples(1), layers=[7], quiet=True)
