"""Two maps' concentration and agreement by hand, and the flags that a model's thresholds make of them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from steering import Diagnose, Request, Sampling
from steering.model.calibration import Calibration
from steering.readouts.flags import FLAGS, Thresholds, flags
from tests.steering.conftest import MakeEngine
from tests.steering.readouts.matrices import chats

THRESHOLDS = Thresholds(0.4, 0.5, 0.25, answers=9, raised={name: {"separates": True} for name in FLAGS})


def test_flags_by_hand() -> None:
    flat, here, there = (torch.full((10,), 1.0) for _ in range(3))
    here[:2], there[-2:] = 10.0, 10.0
    almost = flat + torch.linspace(0, 0.01, 10)
    blind = flags(almost, almost, THRESHOLDS)
    assert (blind["perceptual_blindness"], blind["dissociation"]) == (True, False)
    assert blind["concentration"] == {
        "attention": pytest.approx(0.2, abs=1e-3), "activation": pytest.approx(0.2, abs=1e-3), "overlap": 1.0,
        "agreement": pytest.approx(1.0),
    }  # fmt: skip
    apart = flags(here, there, THRESHOLDS)
    assert (apart["perceptual_blindness"], apart["dissociation"]) == (False, True)
    assert apart["concentration"]["overlap"] == 0.0
    assert apart["concentration"]["attention"] == pytest.approx(20 / 28)
    # Of deviations from the mean 2.8: 7.2 at two places, -1.8 at the eight others.
    covariance, variance = -4 * 7.2 * 1.8 + 6 * 1.8**2, 2 * 7.2**2 + 8 * 1.8**2
    assert apart["concentration"]["agreement"] == pytest.approx(covariance / variance)
    same = flags(here, here, THRESHOLDS)
    assert (same["perceptual_blindness"], same["dissociation"]) == (False, False)
    assert same["thresholds"] == {"top": 0.2, "attention": 0.4, "activation": 0.5, "agreement": 0.25}
    assert same["calibration"] == {"answers": 9, "raised": THRESHOLDS.raised, "digest": None}
    assert flags(here, here, THRESHOLDS, "d1")["calibration"]["digest"] == "d1"


def test_agreement_does_not_jump_where_overlap_does() -> None:
    attention = torch.tensor([3.0, 2.0, 1.001, 1.0, 0.5, 0.4, 0.3, 0.2, 0.1])
    slightly = attention.clone()
    slightly[2] = 2.001  # the third patch is now the second strongest
    before, after = (flags(attention, one, None)["concentration"] for one in (attention, slightly))
    assert before["overlap"] - after["overlap"] == 0.5
    assert before["agreement"] - after["agreement"] < 0.1


@pytest.mark.parametrize(
    ("attention", "activation"),
    [
        (torch.ones(10), torch.zeros(10)),  # nothing is activated
        (torch.zeros(10), torch.ones(10)),
        (torch.ones(10), torch.arange(10.0)),  # a flat map agrees with nothing
        (torch.arange(2.0), torch.arange(2.0)),  # too few patches
    ],
)
def test_what_cannot_be_told_is_none(attention: torch.Tensor, activation: torch.Tensor) -> None:
    found = flags(attention, activation, THRESHOLDS)
    assert (found["perceptual_blindness"], found["dissociation"]) == (None, None)


def test_an_uncalibrated_model_has_numbers_and_no_flags() -> None:
    found = flags(torch.arange(10.0), torch.arange(10.0), None)
    assert (found["perceptual_blindness"], found["dissociation"], found["calibration"]) == (None, None, None)
    assert found["concentration"]["agreement"] == pytest.approx(1)
    assert found["thresholds"] == {"top": 0.2, "attention": None, "activation": None, "agreement": None}


def test_flags_go_by_the_models_thresholds_but_not_where_sinks_are_discounted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl")
    everything = dataclasses.replace(THRESHOLDS, attention=1.0, activation=1.0)  # nothing is as concentrated as that
    sinks = tuple(((1.0,),) for _ in range(engine.mllm.num_layers))
    known = Calibration(engine.mllm.fingerprint, sinks=sinks, images=1, flags=everything)
    monkeypatch.setattr(engine.mllm, "calibration", known)
    wanted = [Diagnose(frozenset({"flags"}), discount_sinks=discounted) for discounted in (False, True)]
    requests = [Request(chats()[0], Sampling(max_tokens=3, ignore_eos=True), diagnose=one) for one in wanted]
    plain, discounted = (result.choices[0].diagnostics["flags"] for result in engine.generate(requests))
    assert (plain["perceptual_blindness"], plain["thresholds"]["attention"]) == (True, 1.0)
    assert (discounted["perceptual_blindness"], discounted["thresholds"]["attention"]) == (None, None)
