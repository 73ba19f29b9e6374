"""Sinks: measured by place, divided out where they attract. Token activation maps beside those of the authors' code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from steering import Diagnose, Request, RequestError, Sampling
from steering.model.calibration import Calibration
from steering.prompt.layout import Layout, build_prompt
from steering.readouts.maps import attraction, discounted
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain, MakeEngine
from tests.steering.plain import Messages, Plain, uncached


def test_attraction_is_the_mean_of_relative_attention() -> None:
    one = torch.tensor([[[1.0, 3.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])  # the second layer saw nothing
    two = torch.tensor([[[4.0, 4.0], [4.0, 4.0]], [[2.0, 0.0], [0.0, 2.0]]])
    assert attraction([one, two]).tolist() == [[[1.0, 2.0], [0.5, 0.5]], [[2.0, 0.0], [0.0, 2.0]]]


def test_other_grids_are_brought_to_the_most_frequent_one() -> None:
    flat, wide = torch.ones(1, 2, 2), torch.tensor([[[1.0, 1.0, 3.0, 3.0], [1.0, 1.0, 3.0, 3.0]]])
    assert attraction([flat, flat, wide])[0].tolist() == [pytest.approx([2.6 / 3, 3.4 / 3], abs=0.05)] * 2


def test_discounting_divides_and_never_raises() -> None:
    rho = torch.tensor([[0.4, 0.2, 0.3, 0.1]])
    sinks = torch.tensor([[[4.0, 1.0], [0.5, 1.0]]])
    assert discounted(rho, sinks, (2, 2)).tolist() == [pytest.approx([0.1, 0.2, 0.3, 0.1])]


def test_maps_come_raw_and_discounted_where_the_model_is_calibrated(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl")
    chat = families.example_messages("qwen2_vl", 2)
    diagnose = Diagnose(frozenset({"patches", "flags"}), layers=(2, 1))
    sampling = Sampling(max_tokens=3, ignore_eos=True)

    def answer(options: Diagnose) -> dict[str, Any]:
        (choice,) = engine.generate([Request(chat, sampling, diagnose=options)])[0].choices
        assert choice.diagnostics is not None
        return choice.diagnostics

    discounting = dataclasses.replace(diagnose, discount_sinks=True)
    with pytest.raises(RequestError, match="calibrate-sinks") as refused:
        answer(discounting)
    assert refused.value.param == "diagnostics.discount_sinks"
    plain = answer(diagnose)
    sinks = torch.rand(3, 3, 3) * 4
    calibration = Calibration(engine.mllm.fingerprint).with_sinks(sinks, 5)
    monkeypatch.setattr(engine.mllm, "calibration", calibration)
    got = answer(discounting)
    for raw, one, image in zip(plain["patches"], got["patches"], got["images"], strict=True):
        assert one["rho"] == raw["rho"]
        expected = discounted(torch.tensor(raw["rho"]), torch.tensor(calibration.sinks)[[2, 1]], tuple(image["grid"]))
        assert torch.allclose(torch.tensor(one["discounted"]), expected, atol=1e-6)
    assert plain["flags"]["concentration"]["attention"] != got["flags"]["concentration"]["attention"]


def test_a_calibration_keeps_what_was_measured_before(tmp_path: Any) -> None:
    first = Calibration("f").with_divergence(torch.rand(2, 50), samples=3)
    both = first.with_sinks(torch.rand(2, 3, 4), 7)
    both.save(tmp_path)
    loaded = Calibration.load(tmp_path, "f", 2)
    assert loaded == both
    assert loaded is not None
    assert loaded.divergence == first.divergence
    assert Calibration("f").thresholds(0.9) is None


def of_authors(
    plain: Plain, messages: Messages, tokens: Sequence[int], layout: Layout, own: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the maps of an answer's tokens, plain and causal, step by step as in tam.py, before its filter.

    own: the question's first token, and the answer's, are explained themselves. There, the likeliest token behind the first
    one and the prompt's last token are explained in their places.
    """
    inputs = plain.inputs(messages)
    states = uncached(plain.model, inputs, tokens[:-1], output_hidden_states=True).hidden_states[-1][0]
    logits = (states @ plain.model.get_output_embeddings().weight.detach().T).clamp(min=0).numpy()
    ids, question = inputs["input_ids"][0].tolist(), layout.user_text.nonzero()[:, 0].tolist()
    words = [ids[place] for place in question] + list(tokens)
    classes = words if own else [int(logits[question[0]].argmax()), *words[1 : len(question)], ids[-1], *tokens[1:]]
    places = question + list(range(len(ids) - 1, len(ids) - 1 + len(tokens)))
    raw = [logits[layout.image_columns.numpy(), token] for token in classes]
    out = []
    for at in range(len(question), len(words)):
        earlier = [i for i in range(at) if words[i] != words[at]]
        weights = np.array([logits[places[i], classes[at]] for i in earlier])
        interference = (np.stack([raw[i] for i in earlier]) * (weights / (weights.sum() + 1e-8))[:, None]).sum(0)
        scale = raw[at] @ interference / max(interference @ interference, 1e-12)
        out.append((raw[at], (raw[at] - scale * interference).clip(min=0)))
    return out


def test_causal_maps_are_those_of_the_authors_but_for_two_tokens(
    make_engine: MakeEngine, load_plain: LoadPlain, load_mllm: LoadMLLM
) -> None:
    messages, diagnose = families.example_messages("llava", 1), Diagnose(frozenset({"tam"}), causal=True)
    request = Request(messages, Sampling(max_tokens=5, ignore_eos=True), diagnose=diagnose)
    (choice,) = make_engine("llava").generate([request])[0].choices
    given = load_plain("llava"), messages, choice.token_ids, build_prompt(load_mllm("llava"), messages).layout
    assert choice.diagnostics is not None
    found = np.array([one["map"] for one in choice.diagnostics["tam"]])
    plain, causal = (np.array(maps) for maps in zip(*of_authors(*given, own=True), strict=True))
    assert np.allclose(found, causal, rtol=1e-4, atol=1e-4)
    assert np.abs(causal - plain).max() > 0.1  # something was subtracted
    released = np.array([causal for _, causal in of_authors(*given, own=False)])
    assert np.abs(found - released).max() > 0.1
