"""VISTA against plain transformers whose FFNs, or layers, are wrapped as the authors wrap them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steering
from steering.interventions.dola import Dola
from steering.interventions.published.vista import Vista
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.published.twins import check_mixed, nearly
from tests.steering.interventions.pushes import chat
from tests.steering.interventions.references import (
    SAMPLING,
    STEPS,
    assert_as_near_as_plain,
    assert_chosen_by,
    only,
    rounding,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain, uncached

FAMILIES = ("qwen2_vl", "qwen3_vl", "llava", "idefics3")


def decided(engine: steering.Engine, messages: Messages, *asked: Any, **more: Any) -> steering.Request:
    return steering.decide(engine, steering.Request(messages, SAMPLING, asked, **more))


def answer(engine: steering.Engine, messages: Messages, *asked: Any, **more: Any) -> steering.Choice:
    return engine.generate([decided(engine, messages, *asked, **more)])[0].choices[0]


def vectors(plain: Plain, family: str, messages: Messages) -> list[torch.Tensor]:
    """Return the difference of the last states behind each layer, with and without pictures."""
    text = [
        {**message, "content": [part for part in message["content"] if part["type"] != "image"]} for message in messages
    ]
    seen, unseen = (plain.answer(prompt, 1) for prompt in (messages, text))
    return [
        seen.hidden[layer, seen.prompt_length - 1] - unseen.hidden[layer, unseen.prompt_length - 1]
        for layer in range(len(plain.layers))
    ]


class SteeredFFN(nn.Module):
    """An FFN as the authors replace it (llm_layers.py), a token at a time."""

    def __init__(self, ffn: nn.Module, vector: torch.Tensor, strength: float, touched: Sequence[bool]):
        super().__init__()
        self.ffn, self.vector, self.strength, self.touched = ffn, vector, strength, touched

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        out = self.ffn(states).clone()
        for at in range(out.shape[1]):
            if self.touched[at]:
                x, v = out[0, at].float(), self.vector.float()
                similarity = float(x @ -v) / float(x.norm() * v.norm())
                y = self.strength * (1 + max(0.0, similarity)) * v / v.norm()
                steered = x / x.norm() + y
                out[0, at] = (steered / steered.norm() * x.norm()).to(out.dtype)
        return out


@contextmanager
def steered(plain: Plain, directions: list[torch.Tensor], options: Vista, touched: Sequence[bool]) -> Iterator[None]:
    """Within, the chosen layers are steered; whole sequences must run, without a cache."""
    chosen = range(len(plain.layers)) if options.layers is None else options.layers
    with ExitStack() as stack:
        for number in chosen:
            layer = plain.layers[number]
            if options.place == "ffn":
                ffn = layer.mlp
                layer.mlp = SteeredFFN(ffn, directions[number], options.strength, touched)
                stack.callback(setattr, layer, "mlp", ffn)
            else:

                def add(module: Any, args: Any, output: torch.Tensor, number: int = number) -> torch.Tensor:
                    own = torch.tensor(list(touched[: output.shape[1]]))[None, :, None]
                    return output + (own * options.strength * directions[number]).to(output.dtype)

                stack.enter_context(layer.register_forward_hook(add))
        yield


@torch.inference_mode()
def by_definition(plain: Plain, family: str, messages: Messages, tokens: Sequence[int], options: Vista) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) along an answer."""
    inputs, count = plain.inputs(messages), len(plain.layers)
    directions = vectors(plain, family, messages)
    ids = [*inputs["input_ids"][0].tolist()]
    image = [token == plain.model.config.image_token_id for token in ids]
    touched = {
        "all": [True] * len(ids), "generated": [False] * len(ids), "image": image, "text": [not one for one in image],
    }[options.tokens] + [options.tokens in ("all", "generated")] * len(tokens)  # fmt: skip
    window = range(max(0, count - 7), count - 1) if options.window is None else options.window
    head, norm = plain.model.get_output_embeddings(), plain.model.get_decoder().norm
    rows, states = [], {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, output: states.__setitem__(layer, output[0, -1])

    with steered(plain, directions, options, touched), ExitStack() as stack:
        for number, layer in enumerate(plain.layers):
            stack.enter_context(layer.register_forward_hook(keep(number)))
        for step in range(len(tokens)):
            logits = uncached(plain.model, inputs, tokens[:step]).logits[0, -1].float()
            early = [head(norm(states[layer]) if options.normalise else states[layer]).float() for layer in window]
            mixed = options.alpha * torch.stack(early).mean(0) + (1 - options.alpha) * logits if early else logits
            rows.append(mixed.log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_vista_is_exact_in_every_kind_of_family(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    plain, messages = load_plain(family), chat(family, 2)
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        choice = answer(engine, messages, Vista())
        assert_chosen_by(choice, by_definition(plain, family, messages, choice.token_ids, Vista()), atol=2e-4)
        assert choice.applied is not None
        count, length = len(plain.layers), float(torch.stack(vectors(plain, family, messages)).norm(dim=-1).mean())
        assert choice.applied["vista"] == {
            **Vista().settings(),
            "layers": list(range(count)),
            "window": list(range(count - 1)),
            "touched": len(plain.inputs(messages)["input_ids"][0]) + STEPS - 1,
            "length": pytest.approx(length, rel=1e-4),
        }


@pytest.mark.parametrize(
    "options",
    [
        Vista(strength=0.6, alpha=0.0),
        Vista(strength=0.6, alpha=0.0, tokens="generated"),
        Vista(strength=0.6, alpha=0.0, tokens="image", layers=[0, 2]),
        Vista(strength=0.05, alpha=0.0, place="residual"),
        Vista(strength=0.05, alpha=0.3, place="residual", layers=[1], tokens="text"),
        Vista(strength=0.0, alpha=0.5),
        Vista(strength=0.0, alpha=1.0, window=[0]),
        Vista(strength=0.3, alpha=0.4, window=[2, 0], normalise=True),
    ],
)
def test_every_option_is_exact(options: Vista, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    plain, messages = load_plain("qwen2_vl"), chat("qwen2_vl")
    choice = answer(make_engine("qwen2_vl"), messages, options)
    assert_chosen_by(choice, by_definition(plain, "qwen2_vl", messages, choice.token_ids, options), atol=2e-4)


def test_rows_of_one_batch_have_their_own_vectors(make_engine: MakeEngine) -> None:
    engine, other = make_engine("qwen2_vl", slots=12), families.example_messages("qwen2_vl", 1, text="How many?")
    messages = chat("qwen2_vl")
    asked: list[tuple[Messages, tuple[Any, ...]]] = [
        (messages, (Vista(),)),
        (messages, ()),
        (other, (Vista(strength=0.05, place="residual", alpha=0.0),)),
        (other, (Vista(alpha=0.6, strength=0.0, normalise=True), steering.Vcd())),
        (messages, (Vista(strength=0.7, layers=[1], tokens="generated"), Dola(premature=[0, 1]))),
        (other, (steering.Think(threshold=0.01), Vista())),
    ]
    check_mixed(engine, [(prompt, tuple(decided(engine, prompt, *own).asked.values())) for prompt, own in asked])


def test_neighbours_keep_every_bit(make_engine: MakeEngine) -> None:
    engine, messages = make_engine("qwen2_vl"), chat("qwen2_vl")
    plain = steering.Request(messages, SAMPLING)
    beside, alone = (
        engine.generate([first, plain])[1].choices[0].logprobs for first in (decided(engine, messages, Vista()), plain)
    )
    assert beside == alone


def test_copied_and_cached_prompts_give_the_same_answers(make_engine: MakeEngine) -> None:
    messages = families.example_messages("qwen2_vl", 1, text="How many? " * 20)
    cached, plain = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**24), make_engine("qwen2_vl")
    expected = answer(plain, messages, Vista())
    for more in ({}, {"n": 2}):
        result = cached.generate([decided(cached, messages, Vista(), **more)])[0]
        for choice in result.choices:
            assert choice.token_ids == expected.token_ids
            assert nearly(choice.applied) == nearly(expected.applied)
            for one, two in zip(choice.logprobs or (), expected.logprobs or (), strict=True):
                assert one.logprob == pytest.approx(two.logprob, abs=1e-4)
    assert result.cached_tokens > 0
    other = cached.generate([decided(cached, messages, Vista(strength=0.3))])[0]
    assert other.cached_tokens == 0, "another strength changes the prompt's states"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, options = chat("qwen2_vl"), Vista(strength=0.4)
    choice = answer(engine, messages, options)
    answers = [
        by_definition(plain, "qwen2_vl", messages, choice.token_ids, options)
        for plain in (load_plain("qwen2_vl"), half)
    ]
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Vista(strength=-1), "vista.strength"),
        (lambda: Vista(alpha=1.5), "vista.alpha"),
        (lambda: Vista(place="attention"), "vista.place"),
        (lambda: Vista(tokens="pictures"), "vista.tokens"),
        (lambda: Vista(window=[-1]), "vista.window[0]"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


@pytest.mark.parametrize(
    ("family", "images", "options", "param"),
    [
        ("qwen2_vl", 1, Vista(layers=[9]), "vista.layers"),
        ("qwen2_vl", 1, Vista(window=[3]), "vista.window"),
        ("qwen2_vl", 1, Vista(tokens="image:2"), "vista.tokens"),
        ("qwen2_vl", 0, Vista(), "vista"),
        ("paligemma2", 1, Vista(), "vista"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(
    family: str, images: int, options: Vista, param: str, make_engine: MakeEngine
) -> None:
    engine = make_engine(family)
    before = engine.stats()["generated_tokens"]
    with pytest.raises(steering.RequestError) as refused:
        answer(engine, families.example_messages(family, images), options)
    assert refused.value.param == param
    assert engine.stats()["generated_tokens"] == before


def test_an_engine_takes_no_vista_whose_vectors_were_not_measured(make_engine: MakeEngine) -> None:
    with pytest.raises(steering.RequestError, match=r"steering\.decide"):
        only(make_engine("qwen2_vl"), chat("qwen2_vl"), Vista())
