"""The engine's diagnostics equal those computed from the plain model's whole attention matrices."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from steering import (
    Choice,
    Diagnose,
    Engine,
    Generate,
    Request,
    RequestError,
    Sage,
    See,
    Steer,
    Think,
    load,
)  # fmt: skip
from steering.prompt.layout import build_prompt
from steering.protocol.readout import REGISTRY as READOUTS
from steering.readouts.focus import lnd, m_lnd, mc_lnd
from steering.recorders import attention
from tests import families
from tests.steering.chats import image, text
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine
from tests.steering.plain import Messages
from tests.steering.readouts.matrices import (
    SAMPLING,
    STEPS,
    TOLERANCE,
    assert_diagnostics,
    chats,
    rows_behind,
    steered,
    vector,
)


def layouts() -> list[Messages]:
    """Return chats of many layouts.

    The question is behind the images, between them and before them; a context is behind and before the image; images are in
    several turns; a question begins before the image and ends behind it.
    """
    ask, told = text("How many people are in image 2?"), text("The shop is closed today.", span="context")
    contents: list[list[dict[str, Any]]] = [
        [image(0), image(1), ask],
        [image(0), ask, image(1)],
        [ask, image(0), image(1)],
        [image(0), ask, told],
        [ask, told, image(0)],
        [told, image(0), ask],
        [image(2), text("Is it open?\nText context: It is closed.\nWell?")],
        [ask, image(1), text("Answer in one word.")],
    ]
    turns = [
        {"role": "user", "content": [image(3), text("What is this?")]},
        {"role": "assistant", "content": [text("A chair.")]},
        {"role": "user", "content": [image(0), text("And this?"), image(1)]},
    ]
    return [*([{"role": "user", "content": content}] for content in contents), turns]


@pytest.mark.parametrize(
    ("family", "budget"), [*((family, 40) for family in families.ANSWERING), ("qwen2_vl", 400), ("gemma3", 400)]
)
def test_equal_to_whole_matrices_in_a_batch_steered_or_not(
    family: str, budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=6, prefill_budget=budget)
    plain = load_plain(family)
    steer, addition = steered(engine.mllm)
    requests, references = [], []
    for number, chat in enumerate(chats() if family in OF_EACH_KIND else chats()[:2]):
        answer = plain.answer(chat, STEPS)
        requests.append(Request(chat, SAMPLING, diagnose=Diagnose()))
        references.append(answer)
        if number < 2:
            requests.append(Request(chat, SAMPLING, interventions=[(steer,)], diagnose=Diagnose()))
            references.append(plain.answer(chat, STEPS, add=[addition]))
        requests.append(Request(chat, SAMPLING))
        references.append(answer)
    for request, answer, result in zip(requests, references, engine.generate(requests), strict=True):
        choice = result.choices[0]
        if request.diagnose is None:
            assert choice.diagnostics is None
            assert list(choice.token_ids) == answer.tokens
        else:
            assert_diagnostics(choice, answer, build_prompt(engine.mllm, request.messages).layout)


@pytest.mark.parametrize(
    ("family", "steps"), [*((family, STEPS) for family in ("qwen2_vl", "gemma3", "idefics3")), ("qwen2_vl", 1)]
)
def test_rows_are_those_that_see_what_is_compared(
    family: str, steps: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    """Only the generated rows count, or the prompt's last one, if the question cannot see an image."""
    engine, plain = make_engine(family, slots=4, prefill_budget=150), load_plain(family)
    sampling = dataclasses.replace(SAMPLING, max_tokens=steps)
    requests = [
        Request(chat, sampling, diagnose=Diagnose(frozenset({"focus", "modality", "decay", "patches"}), spans=spans))
        for chat, spans in zip(layouts(), ("whole", "content", "whole") * 3, strict=True)
    ]
    kinds = set()
    for request, result in zip(requests, engine.generate(requests), strict=True):
        answer = plain.answer(cast(Messages, request.messages), steps)
        layout = build_prompt(engine.mllm, request.messages).layout
        assert_diagnostics(result.choices[0], answer, layout)
        got = result.choices[0].diagnostics
        assert got is not None
        rows, counts = rows_behind(answer, layout, layout.image_columns.tolist())
        kinds.add(tuple(count > 0 for count in counts.values()))
        for patches, shown in zip(got["patches"], layout.images, strict=True):
            told = torch.tensor(patches["rho"])
            if shown.grid is not None:
                whole = answer.attention[:, rows][:, :, shown.columns].mean(1)
                torch.testing.assert_close(told, whole, rtol=0, atol=TOLERANCE)
    assert kinds == (
        {(True, False, False), (False, False, True)} if steps == 1 else {(True, True, False), (False, True, False)}
    )


def test_in_the_whole_prompt_no_attention_is_left_out(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """Qwen2-VL's template inserts a system prompt, which no message says."""
    chat = layouts()[0]
    diagnostics = {
        spans: make_engine("qwen2_vl").generate([Request(chat, SAMPLING, diagnose=Diagnose(spans=spans))])[0]
        for spans in ("whole", "content")
    }
    whole, content = (diagnostics[spans].choices[0].diagnostics for spans in ("whole", "content"))
    assert whole is not None
    assert content is not None
    assert content["decay"]["system"] == [0.0] * STEPS
    assert min(whole["decay"]["system"]) > 0.1
    answer = load_plain("qwen2_vl").answer(chat, 1)
    last = answer.attention[:, -1]  # whose columns are all of the prompt
    vision = build_prompt(make_engine("qwen2_vl").mllm, chat).layout.image_columns
    assert whole["decay"]["vision"][0] == pytest.approx(float(last[:, vision].sum(-1).mean()), abs=TOLERANCE)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava_next"])
def test_readings_survive_joins_leaves_and_moves_between_slots(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=3, prefill_budget=40)
    lengths = [1, 5, 3, 6, 2, 4]
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
    request = Request(chat, sampling, interventions=[(steer,)], diagnose=Diagnose(), n=3, baseline=True)
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
    diagnose = Diagnose(spans="content")
    readout = engine.generate([Request(chat, SAMPLING, diagnose=diagnose)])[0].choices[0].diagnostics
    assert readout is not None
    assert readout["images"] == []
    assert readout["focus"] is None
    assert readout["modality"]["attention_ratio"] is readout["modality"]["by_layer"] is None
    assert readout["decay"]["vision"] == [0.0] * STEPS
    assert readout["decay"]["slope"] is None
    assert readout["decay"]["user"] == [1.0] * STEPS


def test_nothing_but_the_template_has_null_decay(make_engine: MakeEngine) -> None:
    engine = make_engine("internvl")
    chat = [{"role": "user", "content": [text("")]}]
    told = {}
    for spans in ("whole", "content"):
        diagnose = Diagnose(spans=spans)
        readout = engine.generate([Request(chat, SAMPLING, diagnose=diagnose)])[0].choices[0].diagnostics
        assert readout is not None
        assert readout["rows"] == {"question": 0, "output": STEPS - 1, "last": 0}
        told[spans] = [readout["decay"][name] for name in ("vision", "system", "user")]
    assert told == {"whole": [[0.0] * STEPS, [1.0] * STEPS, [0.0] * STEPS], "content": [[None] * STEPS] * 3}


@pytest.mark.parametrize("include", [{"focus"}, {"modality"}, {"decay"}, {"focus", "decay"}, set()])
def test_only_what_was_asked_for_is_reported(include: set[str], make_engine: MakeEngine) -> None:
    request = Request(chats()[0], SAMPLING, diagnose=Diagnose(include=frozenset(include)))
    readout = make_engine("llava").generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert readout.keys() == {"version", "images", "rows", *include}
    assert readout["version"] == 2


def test_the_keys_of_the_envelope_are_those_of_the_wire(make_engine: MakeEngine) -> None:
    request = Request(chats()[0], SAMPLING, diagnose=Diagnose())
    readout = make_engine("llava").generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert list(readout) == ["version", "images", "rows", "focus", "modality", "decay"]
    assert list(readout["images"][0]) == ["image", "tokens", "grid"]
    assert list(readout["focus"]) == [
        *("sigma", "layer_focused", "lnd", "m_lnd", "mc_lnd", "image", "share", "target_image", "correct"),
    ]
    assert list(readout["rows"]) == ["question", "output", "last"]
    assert list(readout["modality"]) == [
        *("attention_ratio", "by_layer", "reason", "image_share", "context_share", "rows"),
    ]
    assert list(readout["decay"]) == ["vision", "system", "user", "spans", "slope"]


def test_the_keys_of_every_readout_are_pinned(make_engine: MakeEngine) -> None:
    request = Request(
        chats()[1], SAMPLING, (Steer(vector(make_engine("internvl").mllm), 0.1),), baseline=True,
        diagnose=Diagnose(frozenset(READOUTS), heatmaps=True),
    )  # fmt: skip
    readout = make_engine("internvl", max_length=1024).generate([request])[0].choices[0].diagnostics
    assert readout is not None
    assert list(readout) == [
        *("version", "images", "rows", "focus", "modality", "decay", "residual", "patches", "tam", "flags", "anchor"),
        *("heatmaps", "drift", "confidence", "alarm", "states", "features"),
    ]
    assert list(readout["confidence"]) == ["mean_logprob", "least_logprob", "least_token"]
    assert list(readout["alarm"]) == ["alarm", "score", "threshold", "numbers", "calibration"]
    assert list(readout["images"][0]) == ["image", "tokens", "grid", "overview"]
    assert list(readout["decay"]) == ["vision", "system", "user", "spans", "slope", "by_layer"]
    assert list(readout["residual"]) == [
        *("rows", "mha_cosine", "ffn_cosine", "mha_change", "ffn_change", "mha_norm", "ffn_norm"),
        *("update_norm", "kl", "gate_ratio", "neuron_ratio"),
    ]
    assert list(readout["patches"][0]) == ["image", "layers", "rho", "overview"]
    assert list(readout["tam"][0]) == ["position", "token", "image", "map", "overview"]
    assert list(readout["flags"]) == [
        *("perceptual_blindness", "dissociation", "concentration", "thresholds", "calibration"),
    ]
    assert list(readout["anchor"]) == ["sigma", "image"]
    assert list(readout["heatmaps"][0]) == ["image", "kind", "layers", "png"]
    assert list(readout["drift"]) == ["to", "rows", "cosine"]
    assert list(readout["states"]) == ["layers", "positions", "shape", "dtype", "safetensors"]
    assert list(readout["features"]) == ["dictionary", "layer", "positions", "active", "features"]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


FAMILIES_AND_DTYPES = [
    *(("qwen2_vl", dtype) for dtype in DTYPES),
    ("gemma3", torch.float16),
    ("llava", torch.float32),
    ("paligemma2", torch.bfloat16),
]
"""PaliGemma 2's scores are soft-capped."""


@pytest.mark.parametrize(("family", "dtype"), FAMILIES_AND_DTYPES, ids=str)
def test_observing_changes_no_bit_of_any_answer(family: str, dtype: torch.dtype, root: Path) -> None:
    """Every readout on one row of a batch; log-probabilities of all rows."""
    engine = Engine(load(families.checkpoint(family, root), dtype=dtype), slots=4, self_check=False)
    sampling = dataclasses.replace(SAMPLING, max_tokens=6, logprobs=20)

    def answers(diagnose: Diagnose | None) -> list[Choice]:
        sage = Sage(See(alpha=0.5, shallow=0), Think(gamma=0.5, threshold=0.01), Generate(weight=0.5))
        requests = [
            Request(chats()[1], sampling, diagnose=diagnose),
            Request(chats()[0], sampling),
            Request(chats()[1], sampling, interventions=[sage], diagnose=diagnose),
        ]
        return [result.choices[0] for result in engine.generate(requests)]

    everything = Diagnose(frozenset(READOUTS), causal=True, residual_rows="prompt")
    for bare, watched in zip(answers(None), answers(everything), strict=True):
        assert bare.token_ids == watched.token_ids
        assert bare.logprobs == watched.logprobs


@pytest.mark.parametrize(("family", "dtype"), FAMILIES_AND_DTYPES[:4], ids=str)
def test_a_neighbour_with_an_intervention_changes_no_bit(family: str, dtype: torch.dtype, root: Path) -> None:
    engine = Engine(load(families.checkpoint(family, root), dtype=dtype), slots=4, self_check=False)
    sampling = dataclasses.replace(SAMPLING, max_tokens=6, logprobs=20)
    plain = Request(chats()[0], sampling, diagnose=Diagnose())

    def answers(other: Sage | None) -> list[Choice]:
        requests = [plain, Request(chats()[0], sampling, interventions=[other])]
        return [result.choices[0] for result in engine.generate(requests)]

    alone = answers(None)[0].logprobs
    for sage in (
        Sage(See(alpha=0.9)),
        Sage(See(alpha=0.9, reading="scale", shallow=2)),
        Sage(think=Think(gamma=0.1, threshold=0.0)),
    ):
        beside, enhanced = answers(sage)
        assert beside.logprobs == alone
        assert enhanced.logprobs != alone


def test_unknown_readouts_and_impossible_targets_are_refused() -> None:
    with pytest.raises(RequestError, match="does not know aura; allowed: focus, modality, decay") as refused:
        Diagnose(include=frozenset({"aura", "focus"}))
    assert refused.value.param == "diagnostics.include"
    with pytest.raises(RequestError, match="counts from 1") as refused:
        Diagnose(target_image=0)
    assert refused.value.param == "diagnostics.target_image"
