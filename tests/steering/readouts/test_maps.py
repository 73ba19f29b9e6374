"""Sinks: measured by place, divided out where they attract."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from steering import Diagnose, Request, RequestError, Sampling
from steering.model.calibration import Calibration
from steering.readouts.maps import attraction, discounted
from tests import families
from tests.steering.conftest import MakeEngine


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
