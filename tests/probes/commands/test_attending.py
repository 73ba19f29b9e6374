"""Calibrations of a model whose layers do not all attend are of those that do."""

from __future__ import annotations

from pathlib import Path

import pytest

import steering
from steering import Diagnose, Request, Sampling
from tests import families
from tests.probes.command_line import run


def test_sinks_are_of_the_layers_that_attend(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = families.checkpoint("qwen3_5", root)
    words = ["probe", "--model", str(folder), "--device", "cpu", "--quiet", "--samples", "2"]
    assert run(*words, "--calibrate-sinks") == 0
    numbers = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("layer")]
    plain = steering.load(folder, device="cpu", calibrations=tmp_path / ".helmsight" / "vectors" / "calibrations")
    kinds = plain.text_config.layer_types
    assert numbers == [str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"]
    assert plain.calibration is not None
    assert len(plain.calibration.sinks or ()) == len(numbers) < plain.num_layers
    engine = steering.Engine(plain, slots=2, max_length=512, self_check=False)
    messages = families.example_messages("qwen3_5", 1)
    diagnose = Diagnose({"patches"}, discount_sinks=True)
    (choice,) = engine.generate([Request(messages, Sampling(max_tokens=2), diagnose=diagnose)])[0].choices
    assert choice.diagnostics is not None
    (entry,) = choice.diagnostics["patches"]
    assert [str(layer) for layer in entry["layers"]] == numbers
    assert entry["discounted"] != entry["rho"]
