"""A direction projected out of the residual stream, against plain transformers with forward hooks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.interventions.project_out import ProjectOut
from steering.prompt.tokens import TokenChoice
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine
from tests.steering.interventions.pushes import by_hand, chat, make_vector
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    assert_chosen_by,
    logprobs_along,
    only,
    rounding,
    states_changed,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.interventions.test_steer_image import image_columns
from tests.steering.plain import Messages, Plain

CHOICES = ("all", "prompt", "generated", "image", "text", "image:2")


def without(plain: Plain, messages: Messages, vector: Any, layers: tuple[int, ...], tokens: str) -> Any:
    """Return the plain model with the direction removed from chosen tokens' states, one after the other."""
    ids = plain.inputs(messages)["input_ids"][0]
    image = ids == plain.model.config.image_token_id
    every = torch.ones(len(ids), dtype=torch.bool)
    of_prompt = {"all": every, "prompt": every, "generated": ~every, "image": image, "text": ~image}
    touched = of_prompt[tokens] if tokens in of_prompt else image_columns(plain, messages, int(tokens[-1]))

    def change(layer: int, states: torch.Tensor, start: int) -> torch.Tensor:
        if layer not in layers:
            return states
        direction = vector.direction[layer].double()
        out = states.clone()
        for row, h in enumerate(states[0].double()):
            place = start + row
            if bool(touched[place]) if place < len(ids) else tokens in ("all", "generated"):
                out[0, row] = (h - (h @ direction) / (direction @ direction) * direction).to(states.dtype)
        return out

    return states_changed(plain, change)


@pytest.mark.parametrize("tokens", CHOICES)
def test_each_choice_of_tokens_is_exact_alone_and_in_pieces(
    tokens: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    vector = make_vector(engine.mllm)
    options = ProjectOut(vector=vector, tokens=tokens, layers=[0, 1, 2])
    for engine_of_kind in (engine, make_engine("qwen2_vl", prefill_budget=11)):
        choice = only(engine_of_kind, chat("qwen2_vl"), options)
        with without(plain, chat("qwen2_vl"), vector, (0, 1, 2), tokens):
            assert_chosen_by(choice, logprobs_along(plain, chat("qwen2_vl"), choice.token_ids))


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_it_is_exact_in_a_mixed_batch_at_the_vectors_own_layers(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family), load_plain(family)
    messages, other_chat = chat(family, 1), families.example_messages(family, 1, text="How many?")
    vector, more = make_vector(engine.mllm), make_vector(engine.mllm, "more", seed=3, layers=(1,))
    requests = [
        steering.Request(messages, SAMPLING, ProjectOut(vector=vector)),
        steering.Request(other_chat, SAMPLING, ProjectOut(vector=more, tokens="image")),
        steering.Request(other_chat, SAMPLING),
        steering.Request(messages, SAMPLING, (ProjectOut(vector=more), steering.Steer(vector, 3.0))),
    ]
    first, second, plain_one, both_vectors = (result.choices[0] for result in engine.generate(requests))
    with without(plain, messages, vector, (0, 2), "all"):
        assert_chosen_by(first, logprobs_along(plain, messages, first.token_ids))
    with without(plain, other_chat, more, (1,), "image"):
        assert_chosen_by(second, logprobs_along(plain, other_chat, second.token_ids))
    assert_chosen_by(plain_one, logprobs_along(plain, other_chat, plain_one.token_ids))
    delta = by_hand(vector, 3.0, (0, 2))
    with states_changed(plain, lambda layer, h, start: h + delta[layer]), without(plain, messages, more, (1,), "all"):
        assert_chosen_by(both_vectors, logprobs_along(plain, messages, both_vectors.token_ids))


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_neighbours_keep_every_bit(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family)
    request = steering.Request(chat(family, 1), SAMPLING)

    def beside(*options: Any) -> Any:
        first = steering.Request(families.example_messages(family, 1, text="How many?"), SAMPLING, options)
        return engine.generate([first, request])[1].choices[0].logprobs

    assert beside(ProjectOut(vector=make_vector(engine.mllm, layers=(0, 1, 2)))) == beside()


def test_the_report_holds_what_was_removed(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain, messages = make_engine("llava"), load_plain("llava"), chat("llava")
    vector = make_vector(engine.mllm)
    for tokens in ("all", "image:2"):
        choice = only(engine, messages, ProjectOut(vector=vector, tokens=tokens))
        shares: dict[int, list[torch.Tensor]] = defaultdict(list)

        def note(
            layer: int, states: torch.Tensor, start: int, shares: dict[int, list[torch.Tensor]] = shares
        ) -> torch.Tensor:
            direction = vector.direction[layer]
            if layer in vector.layers:
                shares[layer].append((states[0] @ direction).abs() / direction.norm() / states[0].norm(dim=-1))
            return states

        with states_changed(plain, note), without(plain, messages, vector, vector.layers, tokens):
            logprobs_along(plain, messages, choice.token_ids)
        removed = torch.stack([torch.cat(steps) for steps in shares.values()])
        if tokens == "image:2":
            columns = image_columns(plain, messages, 2)
            removed = removed[:, : len(columns)][:, columns]
        assert choice.applied is not None
        assert choice.applied["project_out"] == {
            "vector": "test",
            "digest": vector.identity,
            "layers": [0, 2],
            "tokens": tokens,
            "touched": removed.shape[1],
            "removed": pytest.approx(float(removed.mean()), rel=1e-4),
        }


def test_a_slot_keeps_nothing_of_its_predecessor(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    plain = only(engine, chat("qwen2_vl")).logprobs
    assert only(engine, chat("qwen2_vl"), ProjectOut(vector=make_vector(engine.mllm))).logprobs != plain
    assert only(engine, chat("qwen2_vl")).logprobs == plain


def test_copies_and_baselines_give_exact_answers(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=6)
    options = ProjectOut(vector=make_vector(engine.mllm))
    alone, plain = only(engine, chat("qwen2_vl"), options), only(engine, chat("qwen2_vl"))
    result = engine.generate([steering.Request(chat("qwen2_vl"), SAMPLING, options, n=2, baseline=True)])[0]
    for choice in result.choices:
        assert choice.token_ids == alone.token_ids
        assert choice.applied is not None
        assert alone.applied is not None
        removed = [report["project_out"]["removed"] for report in (choice.applied, alone.applied)]
        assert removed[0] == pytest.approx(removed[1], rel=1e-5)
        assert choice.baseline is not None
        assert choice.baseline.token_ids == plain.token_ids


@pytest.mark.parametrize("tokens", ["all", "text"])
def test_a_cached_prompt_reports_the_same(tokens: str, make_engine: MakeEngine) -> None:
    uncached, keeping = make_engine("qwen2_vl"), make_engine("qwen2_vl", prefix_cache_bytes=2**24)
    messages = families.example_messages(
        "qwen2_vl", 1, text="How many? " * 20, system="You are a helpful assistant. " * 9
    )
    options = ProjectOut(vector=make_vector(uncached.mllm), tokens=tokens)
    request = steering.Request(messages, SAMPLING, options)
    keeping.generate([steering.Request(messages, SAMPLING)])
    assert keeping.generate([request])[0].cached_tokens == 0  # what was kept had nothing removed
    again, first = keeping.generate([request])[0], uncached.generate([request])[0].choices[0]
    assert again.cached_tokens > 0
    assert again.choices[0].token_ids == first.token_ids
    removed = [
        choice.applied["project_out"]["removed"] for choice in (again.choices[0], first) if choice.applied is not None
    ]
    assert removed[0] == pytest.approx(removed[1], rel=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    vector, messages = make_vector(engine.mllm), chat("qwen2_vl")
    choice = only(engine, messages, ProjectOut(vector=vector))
    answers = []
    for plain in (load_plain("qwen2_vl"), half):
        with without(plain, messages, vector, (0, 2), "all"):
            answers.append(logprobs_along(plain, messages, choice.token_ids))
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: ProjectOut(tokens="images"), "project_out.tokens"),
        (lambda: ProjectOut(layers=[-1]), "project_out.layers[0]"),
        (lambda: ProjectOut(vector=7), "project_out.vector"),
        (lambda: ProjectOut(strength=1), "project_out.strength"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({}, "project_out.vector"),  # a name, which only a server can look up
        ({"layers": [0, 0]}, "project_out.layers"),
        ({"layers": [99]}, "project_out.layers"),
        ({"tokens": "image:3"}, "project_out.tokens"),
    ],
)
def test_unsuitable_options_are_refused(options: dict[str, Any], param: str, make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector = {"vector": make_vector(engine.mllm)} if options else {}
    with pytest.raises(steering.RequestError) as refused:
        only(engine, chat("qwen2_vl"), ProjectOut(**vector, **options))
    assert refused.value.param == param


def test_a_vector_of_another_model_is_refused(make_engine: MakeEngine) -> None:
    engine, foreign = make_engine("qwen2_vl"), make_engine("llava")
    with pytest.raises(steering.VectorError) as refused:
        only(engine, chat("qwen2_vl"), ProjectOut(vector=make_vector(foreign.mllm)))
    assert (refused.value.param, refused.value.code) == ("project_out.vector", "wrong_model")


def test_choices_of_tokens_are_classes_of_the_prompt() -> None:
    spans = torch.tensor([0, 4, 4, 2, 5, -1])
    touched = {word: TokenChoice(word).touched(spans).tolist() for word in (*CHOICES, "image:3")}
    assert touched == {
        "all": [1, 1, 1, 1, 1, 1],
        "prompt": [1, 1, 1, 1, 1, 1],
        "generated": [0, 0, 0, 0, 0, 0],
        "image": [0, 1, 1, 0, 1, 0],
        "text": [1, 0, 0, 1, 0, 1],
        "image:2": [0, 0, 0, 0, 1, 0],
        "image:3": [0, 0, 0, 0, 0, 0],
    }
