"""The vector against plain transformers on a tiny random model; vectors of several sizes."""

from __future__ import annotations

import functools
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import steering
from probes.conflicts import samples as mc2
from probes.vector import build as module
from probes.vector.build import Recipe, build, grow
from steering.model.processing.processor import load_processor
from tests import families
from tests.probes.conftest import make_samples
from tests.probes.vector.watched import Watched, same


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wording": "v3"}, "'wording' must be one of paper, v2, v1, case; got 'v3'"),
        ({"size": "norm"}, "'size' must be one of queries, mean"),
        ({"states": "all"}, "'states' must be one of plain, instructed"),
        ({"position": 0}, "'position' counts from the prompt's end"),
        ({"position": 4}, "'position' counts from the prompt's end"),
    ],
)
def test_a_wrong_recipe_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**options)


class Plainly:
    """States by transformers alone, one prompt at a time, of samples that `make_samples` makes; each prompt is read once."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()
        self._processor = load_processor(folder)
        self._known: dict[tuple[int, mc2.Setting, bool, mc2.Wording], torch.Tensor] = {}

    def states(self, orders: list[bool], setting: mc2.Setting, wording: mc2.Wording, position: int) -> torch.Tensor:
        """Return the states after every layer at a position: (samples, layers, d); `orders` swaps options by sample."""
        samples = make_samples(len(orders))
        for number, swapped in enumerate(orders):
            if (asked := (number, setting, swapped, wording)) not in self._known:
                self._known[asked] = self._read(mc2.messages(samples[number], setting, swapped, wording=wording))
        return torch.stack([
            self._known[number, setting, swapped, wording][:, position] for number, swapped in enumerate(orders)
        ])  # fmt: skip

    def _read(self, chat: Any) -> torch.Tensor:
        """Return the states of a chat: (layers, tokens, d)."""
        inputs = self._processor.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        last_layer: list[torch.Tensor] = []
        # output_hidden_states gives the last layer after the final norm; a hook sees it before.
        last = self._model.get_decoder().layers[-1]
        handle = last.register_forward_hook(lambda module, args, output: last_layer.append(output))
        with torch.no_grad():
            hidden = self._model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        handle.remove()
        return torch.cat([*hidden[1:-1], last_layer[0]])


plainly = functools.cache(Plainly)


@functools.cache
def loaded(folder: Path) -> steering.MLLM:
    return steering.load(folder, device="cpu")


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
@pytest.mark.parametrize(
    ("recipe", "budget"),
    [
        (Recipe(), 512),
        (Recipe("v1", -2, "mean", "instructed"), 512),
        (Recipe("v2", -2), 7),  # in chunks, whose last one need not hold the token
        (Recipe("paper", -20, "mean"), 16),
    ],
)
def test_vector_equals_plain_transformers(root: Path, family: str, recipe: Recipe, budget: int) -> None:
    folder = families.checkpoint(family, root)
    samples = make_samples(3)
    engine = steering.Engine(loaded(folder), slots=2, max_length=512, prefill_budget=budget, self_check=False)
    vector = build(engine, samples, recipe=recipe, seed=5, quiet=True)

    rng = random.Random(5)  # the seed decides which option comes first, sample by sample
    orders = [rng.random() < 0.5 for _ in samples]
    settings: tuple[mc2.Setting, ...] = ("text", "vision", "plain")
    text, vision, plain = (
        plainly(folder).states(orders, setting, recipe.wording, recipe.position) for setting in settings
    )
    difference = (text - vision).double()
    per_query = difference.abs().mean(-1)
    instructed = torch.cat([text, vision]).double().abs().mean((0, 2))
    state = plain.double().abs().mean((0, 2)) if recipe.states == "plain" else instructed
    size = per_query.mean(0) if recipe.size == "queries" else difference.mean(0).abs().mean(-1)
    scale = float(instructed.max())
    torch.testing.assert_close(vector.direction.double(), difference.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.mean_abs.double(), per_query.mean(0), atol=1e-5 * scale, rtol=0)
    torch.testing.assert_close(vector.std.double(), per_query.std(0, correction=0), atol=1e-5 * scale, rtol=0)
    # A window that ends before the instruction leaves Gemma's first layer no direction, and no weight.
    present = size > 1e-5 * instructed
    weight = torch.where(present, state / size, 0.0)
    torch.testing.assert_close(vector.weight.double(), weight, atol=0, rtol=2e-3)
    assert present.tolist() == [family != "gemma3", True, True]
    assert vector.fingerprint == engine.mllm.fingerprint
    told = vector.info["magnitudes"]
    assert told["states"]["plain"] == pytest.approx(plain.double().abs().mean((0, 2)).tolist(), rel=1e-4)
    assert told["states"]["instructed"] == pytest.approx(instructed.tolist(), rel=1e-4)
    assert told["direction"]["mean"][1:] == pytest.approx(difference.mean(0).abs().mean(-1).tolist()[1:], rel=1e-3)


def test_a_position_before_the_prompt_is_refused(tiny: steering.Engine) -> None:
    with pytest.raises(steering.RequestError, match=r"'state_position' must be from -\d+ to -1.*got -5000"):
        build(tiny, make_samples(1), recipe=Recipe(position=-5000), quiet=True)


def test_metadata_tells_how_the_vector_was_made(tiny: steering.Engine) -> None:
    samples = make_samples(3)
    vector = build(tiny, samples, name="mine", layers=[1], seed=2, quiet=True)
    assert vector.name == "mine"
    assert vector.layers == (1,)
    info = vector.info
    assert (info["samples"], info["tasks"], info["seed"]) == (3, ["color", "shape"], 2)
    swaps = random.Random(2)  # the draw that the documentation speaks of, from the seed alone
    assert info["orders"] == "".join("1" if swaps.random() < 0.5 else "0" for _ in range(3))
    assert info["recipe"] == {"wording": "paper", "position": -1, "size": "queries", "states": "plain"}
    assert vector.published == info["published"] == 1.0
    assert set(info["versions"]) == {"helmsight", "torch", "transformers"}
    assert steering.SteeringVector.from_bytes(vector.to_bytes()).info == info


def test_the_data_hash_changes_with_prompts_and_pictures(tiny: steering.Engine) -> None:
    def digest(samples: list[mc2.ConflictSample]) -> str:
        return str(build(tiny, samples, quiet=True).info["data_sha256"])

    assert digest(make_samples(2)) == digest(make_samples(2))
    assert digest(make_samples(2)) != digest(make_samples(2, question="Which color?"))
    assert digest(make_samples(2)) != digest(make_samples(2, shade=9))


def test_an_unreliable_direction_is_said(tiny: steering.Engine, caplog: pytest.LogCaptureFixture) -> None:
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


def test_vectors_of_several_sizes_are_those_of_the_first_samples_alone(tiny: steering.Engine) -> None:
    samples = make_samples(7)
    counting = Watched(tiny)
    grown = grow(counting, samples, [1, 4, 7], name="sized", layers=[2], seed=3, quiet=True)
    assert counting.taken == 3 * 7
    for size, vector in zip([1, 4, 7], grown, strict=True):
        assert vector.info["samples"] == size
        same(vector, build(tiny, samples[:size], name="sized", layers=[2], seed=3, quiet=True))
    assert len({vector.info["data_sha256"] for vector in grown}) == 3


def test_samples_beyond_the_last_size_are_not_asked(tiny: steering.Engine) -> None:
    counting = Watched(tiny)
    (vector,) = grow(counting, make_samples(5), [2], quiet=True)
    assert counting.taken == 6
    same(vector, build(tiny, make_samples(2), quiet=True))


@pytest.mark.parametrize("sizes", [[3, 2], [2, 2], [1, 6]])
def test_sizes_rise_and_there_are_so_many_samples(tiny: steering.Engine, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="The sizes must rise, up to the 5 samples there are"):
        grow(tiny, make_samples(5), sizes, quiet=True)


@pytest.mark.parametrize("sizes", [[], [0], [-1, 3]])
def test_no_size_is_smaller_than_one(tiny: steering.Engine, sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        grow(tiny, make_samples(5), sizes, quiet=True)
