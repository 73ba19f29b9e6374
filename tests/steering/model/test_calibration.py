"""Thresholds of a model: quantiles by hand, and files that are not this model's."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import Request, Sage, Sampling, Think, UnsupportedModel
from steering.model.calibration import FILE, Calibration
from steering.model.thresholds import Thresholds
from tests import families


def test_thresholds_are_quantiles() -> None:
    values = torch.stack([torch.arange(201.0), torch.arange(201.0).flip(0) * 2])
    made = Calibration("f").with_divergence(values, samples=3)
    assert made.tokens == 201
    assert made.thresholds(0.9).tolist() == pytest.approx([180, 360])
    assert made.thresholds(0.123).tolist() == pytest.approx([24.6, 49.2])
    assert made.thresholds(1.0).tolist() == [200, 400]
    assert made.thresholds(0.0).tolist() == [0, 0]


RATES = {"right": [0.05, 0.03, 0.07], "wrong": [0.2, 0.1, 0.3], "separates": True}
FLAGGED = Thresholds(0.4, 0.3, -0.1, answers=100, raised={"perceptual_blindness": RATES, "dissociation": RATES})


def test_the_file_keeps_what_was_measured(tmp_path: Path) -> None:
    made = replace(Calibration("f").with_divergence(torch.rand(2, 50), samples=3), flags=FLAGGED)
    made.save(tmp_path)
    assert Calibration.load(tmp_path, "f", 2) == made
    assert Calibration.load(tmp_path / "nowhere", "f", 2) is None
    assert Calibration.load(None, "f", 2) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other/1"},
        {"divergence": [[0.0]]},
        {"divergence": 5},
        {"sinks": [[[1.0]]]},
        {"sinks": [[], []]},
        {"surprise": 1},
        {"flags": {"attention": 0.4}},
        {"flags": asdict(FLAGGED) | {"agreement": None}},
        {"flags": asdict(FLAGGED) | {"raised": {"dissociation": RATES}}},
        {"fingerprint": "another"},
    ],
)
def test_other_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = Calibration("f").with_divergence(torch.rand(2, 50), samples=3).save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=FILE):
        Calibration.load(tmp_path, "f", 2)


def test_the_engine_thinks_with_the_models_own_thresholds(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families.checkpoint("qwen2_vl", root), tmp_path / "model"))
    chat, sampling = families.example_messages("qwen2_vl", 1), Sampling(max_tokens=4, ignore_eos=True)
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=2, max_length=512, self_check=False)
    measured = engine.generate([Request(chat, sampling, divergence=True)])[0].choices[0].divergence
    assert measured.shape == (families.LAYERS, engine.submit(Request(chat, sampling)).prompt_tokens)
    Calibration(engine.mllm.fingerprint).with_divergence(measured, 1).save(folder)
    engine = steering.Engine(steering.load(folder, device="cpu"), slots=2, max_length=512, self_check=False)
    thinking = Request(chat, Sampling(max_tokens=1), interventions=[Sage(think=Think(gamma=1.0, quantile=0.75))])
    report = engine.generate([thinking])[0].choices[0].applied["sage"]["think"]
    expected = (measured > measured.double().quantile(0.75, dim=1, keepdim=True) + 1e-6).float().mean(1)
    assert report["suppressed"] == pytest.approx(expected.tolist(), abs=0.5 / measured.shape[1])
    assert report["divergence"] == pytest.approx(measured.mean(1).tolist(), rel=1e-4)
