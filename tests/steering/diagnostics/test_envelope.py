"""The engine's diagnostics equal those computed from the plain model's whole attention matrices."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch

from steering import MLLM, READOUTS, Choice, Diagnose, Request, RequestError, Sampling, Steer, SteeringVector, attention
from steering.diagnostics.focus import lnd, m_lnd, mc_lnd
from steering.layout import Layout, build_prompt
from steering.spans import CONTEXT, QUESTION, SYSTEM, USER
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.plain import Addition, Answer, Messages, Plain

LoadPlain = Callable[[str], Plain]
STEPS = 5
TOLERANCE = 1e-5


def text(content: str, **more: str) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def image(index: int) -> dict[str, Any]:
    return {"type": "image", "image": families.example_image(index)}


def chats() -> list[Messages]:
    """One and three images, context by line and by span, system prompt, texts between images, an earlier turn."""
    system = {"role": "system", "content": [text("You are a helpful assistant.")]}
    return [
        [system, {"role": "user", "content": [image(0), text("Text context: the shop is closed.\nIs it open?")]}],
        [
            {
                "role": "user",
                "content": [
                    *(image(1), text("The first."), image(2), text("There are three people.", span="context")),
                    *(image(0), text("How many people are in the second image? " * 3)),
                ],
            }
        ],
        [
            system,
            {"role": "user", "content": [image(3), text("What is this?")]},
            {"role": "assistant", "content": [text("A chair.")]},
            {"role": "user", "content": [text("Are you sure?")]},
        ],
    ]


def expected(answer: Answer, layout: Layout) -> dict[str, Any]:
    """sigma, attention ratio and decay, from their definitions, on whole matrices."""
    n = answer.prompt_length
    generated = torch.arange(n, answer.attention.shape[1])
    rows = torch.cat([layout.columns(QUESTION), generated])
    attention = answer.attention[:, rows]  # (layers, rows, columns)
    sigma = torch.stack([attention[:, :, picture.columns].mean((1, 2)) for picture in layout.images], dim=1)
    vision = torch.cat([picture.columns for picture in layout.images])
    context = layout.columns(CONTEXT)
    out: dict[str, Any] = {"sigma": sigma, "ratio": None, "by_layer": None}
    if len(context):
        one, other = attention[:, :, vision].mean((1, 2)), attention[:, :, context].mean((1, 2))
        out["by_layer"] = one / (one + other)
        out["ratio"] = one.mean() / (one.mean() + other.mean())
    user = torch.cat([layout.columns(span) for span in (CONTEXT, QUESTION, USER)])
    steps = answer.attention[:, n - 1 :]
    parts = torch.stack([steps[:, :, part].sum(-1) for part in (vision, layout.columns(SYSTEM), user)], dim=-1)
    out["decay_layers"] = parts / parts.sum(-1, keepdim=True)  # (layers, steps, 3)
    out["decay"] = out["decay_layers"].nanmean(0)
    return out


def numbers(values: Any) -> torch.Tensor:
    """A list with None for NaN."""
    return torch.tensor([torch.nan if value is None else value for value in values])


def assert_diagnostics(choice: Choice, answer: Answer, layout: Layout) -> None:
    assert list(choice.token_ids) == answer.tokens
    got, wanted = choice.diagnostics, expected(answer, layout)
    assert got is not None

    def close(one: torch.Tensor, other: torch.Tensor) -> None:
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE, equal_nan=True)

    close(torch.tensor(got["focus"]["sigma"]), wanted["sigma"])
    if wanted["ratio"] is None:
        assert got["modality"] == {"attention_ratio": None, "by_layer": None}
    else:
        close(numbers(got["modality"]["by_layer"]), wanted["by_layer"])
        assert got["modality"]["attention_ratio"] == pytest.approx(float(wanted["ratio"]), abs=TOLERANCE)
    close(torch.stack([numbers(got["decay"][name]) for name in ("vision", "system", "user")], dim=1), wanted["decay"])
    vision = wanted["decay"][:, 0]
    line = np.polyfit(np.arange(len(vision)), vision.numpy(), 1)
    assert got["decay"]["slope"] == pytest.approx(float(line[0]), abs=TOLERANCE)
    assert got["rows"] == {"question": layout.count(QUESTION), "output": len(choice.token_ids) - 1}
    for number, (told, span) in enumerate(zip(got["images"], layout.images, strict=True), start=1):
        assert (told["image"], told["tokens"]) == (number, len(span.columns))
        assert span.grid is None or told["grid"] == list(span.grid)  # tiles: see test_tiles
    json.dumps(got, allow_nan=False)


def vector(mllm: MLLM) -> SteeringVector:
    generator = torch.Generator().manual_seed(5)
    layers = mllm.num_layers
    direction = torch.randn(layers, mllm.hidden_size, generator=generator)
    ones = torch.ones(layers)
    return SteeringVector("test", direction, 0.5 * ones, ones, ones, (0, 1), mllm.fingerprint)


def steered(mllm: MLLM) -> tuple[Steer, Addition]:
    """The same push for the engine and for the plain model."""
    made = vector(mllm)
    delta = torch.zeros_like(made.direction)
    delta[:2] = -0.8 * 0.5 * made.direction[:2]
    return Steer(made, -0.8), (delta, "all")


SAMPLING = Sampling(max_tokens=STEPS, ignore_eos=True)


@pytest.mark.parametrize("budget", [400, 9])
@pytest.mark.parametrize("family", families.FAMILIES)
def test_equal_to_whole_matrices_in_a_batch_steered_or_not(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=6, prefill_budget=budget)
    plain = load_plain(family)
    steer, addition = steered(engine.mllm)
    requests, references = [], []
    for number, chat in enumerate(chats()):
        requests.append(Request(chat, SAMPLING, diagnose=Diagnose()))
        references.append(plain.answer(chat, STEPS))
        if number < 2:
            requests.append(Request(chat, SAMPLING, steering=(steer,), diagnose=Diagnose()))
            references.append(plain.answer(chat, STEPS, add=[addition]))
        requests.append(Request(chat, SAMPLING))
        references.append(references[-1] if number == 2 else plain.answer(chat, STEPS))
    for request, answer, result in zip(requests, references, engine.generate(requests), strict=True):
        choice = result.choices[0]
        if request.diagnose is None:
            assert choice.diagnostics is None
            assert list(choice.token_ids) == answer.tokens
        else:
            assert_diagnostics(choice, answer, build_prompt(engine.mllm, request.messages).layout)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_next"])
def test_readings_survive_joins_leaves_and_moves_between_slots(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=3, prefill_budget=40)
    lengths = [1, 7, 3, 9, 2, 5, 8, 4]
    requests = [
        Request(
            chats()[number % 3],
            dataclasses.replace(SAMPLING, max_tokens=length),
            diagnose=Diagnose() if number % 4 else None,
        )
        for number, length in enumerate(lengths)
    ]
    for request, length, result in zip(requests, lengths, engine.generate(requests), strict=True):
        if request.diagnose is not None:
            answer = load_plain(family).answer(cast(Messages, request.messages), length)
            assert_diagnostics(result.choices[0], answer, build_prompt(engine.mllm, request.messages).layout)


def test_long_questions_are_captured_in_pieces(
    make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "CAPTURE_ROWS", 4)
    engine = make_engine("qwen2_vl")
    requests = [Request(chat, SAMPLING, diagnose=Diagnose()) for chat in chats()]
    for request, result in zip(requests, engine.generate(requests), strict=True):
        answer = load_plain("qwen2_vl").answer(cast(Messages, request.messages), STEPS)
        assert_diagnostics(result.choices[0], answer, build_prompt(engine.mllm, request.messages).layout)


def test_answers_that_outgrow_the_window_keep_their_decay(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """Gemma 3's sliding layers see eight tokens: after a while neither the image nor the user's text."""
    engine = make_engine("gemma3")
    sampling = dataclasses.replace(SAMPLING, max_tokens=20)
    result = engine.generate([Request(chats()[0], sampling, diagnose=Diagnose())])[0]
    layout = build_prompt(engine.mllm, chats()[0]).layout
    assert_diagnostics(result.choices[0], load_plain("gemma3").answer(chats()[0], 20), layout)
    assert result.choices[0].diagnostics is not None
    assert None not in result.choices[0].diagnostics["decay"]["vision"]


def test_each_of_several_answers_and_its_baseline_has_its_own(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine("qwen2_5_vl", slots=6)
    plain, chat = load_plain("qwen2_5_vl"), chats()[0]
    steer, addition = steered(engine.mllm)
    sampling = dataclasses.replace(SAMPLING, temperature=1.5, seed=1)
    request = Request(chat, sampling, steering=(steer,), diagnose=Diagnose(), n=3, baseline=True)
    layout = build_prompt(engine.mllm, chat).layout
    choices = engine.generate([request])[0].choices
    assert len({choice.token_ids for choice in choices}) == 3
    for choice in choices:
        assert_diagnostics(choice, plain.answer(chat, STEPS, add=[addition], forced=choice.token_ids), layout)
        assert choice.baseline is not None
        assert_diagnostics(choice.baseline, plain.answer(chat, STEPS, forced=choice.baseline.token_ids), layout)


def test_focus_is_that_of_sigma(make_engine: MakeEngine) -> None:
    for layers in (1, 2, 3):
        engine = make_engine("qwen2_vl", focus_layers=layers)
        diagnose = Diagnose(target_image=2)
        readout = engine.generate([Request(chats()[1], SAMPLING, diagnose=diagnose)])[0].choices[0].diagnostics
        assert readout is not None
        sigma = torch.tensor(readout["focus"]["sigma"])
        for name, metric in (("lnd", lnd), ("m_lnd", m_lnd), ("mc_lnd", mc_lnd)):
            found = metric(sigma[-layers:])
            assert found is not None
            assert readout["focus"][name] == {"n": layers, "image": found + 1}
        assert readout["focus"]["layer_focused"] == (sigma.argmax(1) + 1).tolist()
        assert readout["focus"]["target_image"] == 2
        assert readout["focus"]["correct"] == (readout["focus"]["image"] == 2)


def test_what_does_not_exist_is_null(make_engine: MakeEngine) -> None:
    engine = make_engine("internvl")  # its template adds no system prompt
    chat = [{"role": "user", "content": [text("Text context: the shop is closed.\nIs it open?")]}]
    readout = engine.generate([Request(chat, SAMPLING, diagnose=Diagnose())])[0].choices[0].diagnostics
    assert readout is not None
    assert readout["images"] == []
    assert readout["focus"] is None
    assert readout["modality"] == {"attention_ratio": None, "by_layer": None}
    assert readout["decay"]["vision"] == [0.0] * STEPS
    assert readout["decay"]["slope"] is None
    assert readout["decay"]["user"] == [1.0] * STEPS


def test_nothing_but_the_template_has_null_decay(make_engine: MakeEngine) -> None:
    engine = make_engine("internvl")
    chat = [{"role": "user", "content": [text("")]}]
    readout = engine.generate([Request(chat, SAMPLING, diagnose=Diagnose())])[0].choices[0].diagnostics
    assert readout is not None
    assert readout["rows"] == {"question": 0, "output": STEPS - 1}
    assert readout["decay"] == {name: [None] * STEPS for name in ("vision", "system", "user")} | {"slope": None}


@pytest.mark.parametrize("include", [{"focus"}, {"modality"}, {"decay"}, {"focus", "decay"}, set()])
def test_only_what_was_asked_for_is_reported(include: set[str], make_engine: MakeEngine) -> None:
    request = Request(chats()[0], SAMPLING, diagnose=Diagnose(include=frozenset(include)))
    readout = make_engine("llava").generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert readout.keys() == {"version", "images", "rows", *include}
    assert readout["version"] == 1


def test_the_keys_of_the_envelope_are_those_of_the_wire(make_engine: MakeEngine) -> None:
    request = Request(chats()[0], SAMPLING, diagnose=Diagnose())
    readout = make_engine("llava").generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert list(readout) == ["version", "images", "rows", "focus", "modality", "decay"]
    assert list(readout["images"][0]) == ["image", "tokens", "grid"]
    assert list(readout["focus"]) == [
        *("sigma", "layer_focused", "lnd", "m_lnd", "mc_lnd", "image", "share", "target_image", "correct"),
    ]
    assert list(readout["modality"]) == ["attention_ratio", "by_layer"]
    assert list(readout["decay"]) == ["vision", "system", "user", "slope"]


def test_the_keys_of_every_readout_are_pinned(make_engine: MakeEngine) -> None:
    request = Request(
        chats()[1], SAMPLING, (Steer(vector(make_engine("internvl").mllm), 0.1),), baseline=True,
        diagnose=Diagnose(frozenset(READOUTS), heatmaps=True),
    )  # fmt: skip
    readout = make_engine("internvl", max_length=1024).generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert list(readout) == [
        *("version", "images", "rows", "focus", "modality", "decay", "residual", "patches", "tam", "flags", "anchor"),
        *("heatmaps", "drift"),
    ]
    assert list(readout["images"][0]) == ["image", "tokens", "grid", "overview"]
    assert list(readout["decay"]) == ["vision", "system", "user", "slope", "by_layer"]
    assert list(readout["residual"]) == [
        *("mha_cosine", "ffn_cosine", "mha_change", "ffn_change", "kl", "neuron_ratio"),
    ]
    assert list(readout["patches"][0]) == ["image", "layers", "rho", "overview"]
    assert list(readout["tam"][0]) == ["position", "token", "image", "map", "overview"]
    assert list(readout["flags"]) == ["perceptual_blindness", "dissociation", "concentration", "thresholds"]
    assert list(readout["anchor"]) == ["sigma", "image"]
    assert list(readout["heatmaps"][0]) == ["image", "kind", "layers", "png"]
    assert list(readout["drift"]) == ["to", "cosine"]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
def test_diagnostics_change_neither_the_answer_nor_the_neighbours(family: str, make_engine: MakeEngine) -> None:
    """The weights are computed by another kernel, so sums may be rounded differently, and no more than that."""
    sampling = dataclasses.replace(SAMPLING, logprobs=5)

    def answers(diagnose: Diagnose | None) -> list[Choice]:
        requests = [Request(chats()[1], sampling, diagnose=diagnose), Request(chats()[0], sampling)]
        return [result.choices[0] for result in make_engine(family).generate(requests)]

    for bare, watched in zip(answers(None), answers(Diagnose()), strict=True):
        assert bare.token_ids == watched.token_ids
        assert bare.logprobs is not None
        assert watched.logprobs is not None
        for one, other in zip(bare.logprobs, watched.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_unknown_readouts_and_impossible_targets_are_refused() -> None:
    with pytest.raises(RequestError, match="does not know aura; allowed: focus, modality, decay") as refused:
        Diagnose(include=frozenset({"aura", "focus"}))
    assert refused.value.param == "diagnostics.include"
    with pytest.raises(RequestError, match="counts from 1") as refused:
        Diagnose(target_image=0)
    assert refused.value.param == "diagnostics.target_image"
