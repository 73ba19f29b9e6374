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
from steering import Request, RequestError, Sage, Sampling, Think, UnsupportedModel
from steering.model.calibration import FILE, Calibration
from steering.model.processing.pixels import picture
from steering.model.thresholds import Thresholds
from tests import families


def test_thresholds_are_quantiles() -> None:
    values = torch.stack([torch.arange(201.0), torch.arange(201.0).flip(0) * 2])
    measured = Calibration("f").with_divergence(values, samples=3)
    assert measured.tokens == 201
    assert measured.thresholds(0.9).tolist() == pytest.approx([180, 360])
    assert measured.thresholds(0.123).tolist() == pytest.approx([24.6, 49.2])
    assert measured.thresholds(1.0).tolist() == [200, 400]
    assert measured.thresholds(0.0).tolist() == [0, 0]


RATES = {"right": [0.05, 0.03, 0.07], "wrong": [0.2, 0.1, 0.3], "separates": True}
FLAGGED = Thresholds(0.4, 0.3, -0.1, answers=100, raised={"perceptual_blindness": RATES, "dissociation": RATES})


def test_the_file_keeps_what_was_measured(tmp_path: Path) -> None:
    calibration = replace(Calibration("f").with_divergence(torch.rand(2, 50), samples=3), flags=FLAGGED)
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path, "f", 2) == calibration
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
def test_invalid_files_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    path = Calibration("f").with_divergence(torch.rand(2, 50), samples=3).save(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UnsupportedModel, match=FILE):
        Calibration.load(tmp_path, "f", 2)


def test_the_users_file_goes_before_the_model_s_own(tmp_path: Path) -> None:
    calibration = replace(
        Calibration("f").with_divergence(torch.rand(2, 50), samples=3), flags=FLAGGED, surprise=1.5, contexts=4
    )
    users = replace(Calibration("f").with_divergence(torch.rand(2, 60), samples=9), surprise=2.5, contexts=8)
    calibration.save(tmp_path)
    folder = tmp_path / "vectors" / "calibrations"
    assert users.keep(folder) == folder / "f.json"
    loaded = Calibration.load(tmp_path, "f", 2, folder)
    assert loaded == replace(users, flags=FLAGGED)
    assert Calibration.load(None, "f", 2, folder) == users
    assert Calibration.load(tmp_path, "f", 2, tmp_path / "nowhere") == calibration
    (folder / "f.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"f\.json is not a valid calibration"):
        Calibration.load(tmp_path, "f", 2, folder)


def test_a_model_without_one_thinks_with_thresholds_of_the_self_check(root: Path, tmp_path: Path) -> None:
    """Thresholds are quantiles over all tokens of the check's two prompts; the answer says that none was calibrated."""
    mllm = steering.load(families.checkpoint("qwen2_vl", root), device="cpu")
    chat = families.example_messages("qwen2_vl", 1)
    thinking = Request(chat, Sampling(max_tokens=1), interventions=[Sage(think=Think(gamma=1.0))])
    unchecked = steering.Engine(mllm, slots=2, max_length=512, self_check=False)
    with pytest.raises(RequestError, match="was not calibrated"):
        unchecked.submit(thinking)
    engine = steering.Engine(mllm, slots=2, max_length=512)
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text", "text": text}]}]
        for text in ("What is this?", "Describe the picture in a few words, then say what is missing.")
    ]
    divergences = [
        result.choices[0].divergence for result in engine.generate([Request(chat, divergence=True) for chat in chats])
    ]
    expected = (
        torch.cat([divergence for divergence in divergences if divergence is not None], 1).double().quantile(0.9, dim=1)
    )
    assert Think().thresholds(mllm).tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    report = engine.generate([thinking])[0].choices[0].applied["sage"]["think"]
    assert report["calibrated"] is False

    stated = Request(chat, Sampling(max_tokens=1), interventions=[Think(threshold=0.5)])
    assert engine.generate([stated])[0].choices[0].applied["sage"]["think"]["calibrated"] is None
    Calibration(mllm.fingerprint).with_divergence(torch.rand(mllm.num_layers, 50), 1).keep(tmp_path)
    mllm = steering.load(families.checkpoint("qwen2_vl", root), device="cpu", calibrations=tmp_path)
    calibrated = steering.Engine(mllm, slots=2, max_length=512, self_check=False)
    assert calibrated.generate([thinking])[0].choices[0].applied["sage"]["think"]["calibrated"] is True


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
