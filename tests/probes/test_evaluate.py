"""The report of an evaluation, its controls, and the commands end to end on a tiny random model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

import steering
from probes import command
from probes.asking import Answers
from probes.build import build
from probes.evaluate import Evaluation, Measured, evaluate, random_like, spread
from probes.mc2 import Sample, Shares
from tests import families
from tests.probes.conftest import make_samples

FIELDS = {"s_vision", "s_text", "s_others", "vision_ratio", "n"}


def test_accuracy_counts_questions_not_samples() -> None:
    answers = Answers([("A", "B"), ("A", "A"), (None, "B"), ("B", "A")])
    assert answers.accuracy() == 4 / 8
    assert answers.accuracy("text") == 3 / 8
    assert answers.outcomes == ["vision", "others", "others", "text"]


def test_the_report_has_the_agreed_fields(tiny: steering.Engine) -> None:
    samples = make_samples(3)
    report = evaluate(tiny, build(tiny, samples, quiet=True), samples, quiet=True).to_json()
    assert set(report) == {"plain", "vision", "text"}
    for condition in report.values():
        assert set(condition) >= FIELDS
        assert condition["n"] == 3
        assert condition["s_vision"] + condition["s_text"] + condition["s_others"] == pytest.approx(1.0)


def test_controls_and_instructions_come_only_when_asked_for(tiny: steering.Engine) -> None:
    samples = make_samples(2)
    vector = build(tiny, samples, quiet=True)
    report = evaluate(tiny, vector, samples, instruct=True, random_directions=2, quiet=True).to_json()
    assert set(report) == {"plain", "vision", "text", "instruct_vision", "instruct_text", "random"}
    assert report["random"]["directions"] == 2
    assert len(report["random"]["each"]) == 2


def test_random_directions_are_the_same_dose(tiny: steering.Engine) -> None:
    vector = build(tiny, make_samples(2), layers=[1], quiet=True)
    first, again, other = random_like(vector, 1), random_like(vector, 1), random_like(vector, 2)
    torch.testing.assert_close(first.delta(0.7).norm(dim=-1), vector.delta(0.7).norm(dim=-1))
    torch.testing.assert_close(first.direction, again.direction)
    cosine = torch.nn.functional.cosine_similarity(first.direction, other.direction, dim=-1)
    assert cosine.abs().max() < 0.6


def test_ratios_that_do_not_exist_are_left_out_of_the_spread() -> None:
    assert spread([0.2, None, 0.6]) == {"min": 0.2, "mean": pytest.approx(0.4), "max": 0.6}
    assert spread([None]) == {"min": None, "mean": None, "max": None}


def test_null_where_no_ratio_exists() -> None:
    report = Evaluation({"plain": Measured(Shares.of(["others"]))}).to_json()
    assert json.loads(json.dumps(report))["plain"] == {
        "s_vision": 0.0, "s_text": 0.0, "s_others": 1.0, "vision_ratio": None, "n": 1,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- commands


def _samples(count: int, seed: int) -> list[Sample]:
    return make_samples(count, shade=seed % 256)


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers(required=True), demo_samples=_samples)
    arguments = parser.parse_args(words)
    return int(arguments.func(arguments))


def test_probe_then_eval(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(families.checkpoint("qwen2_vl", root))
    vector, report = tmp_path / "v.safetensors", tmp_path / "shares.json"
    common = ("--model", model, "--device", "cpu", "--seed", "3", "--quiet")
    assert _run("probe", *common, "--samples", "4", "--no-calibrate", "--layers", "2", "--out", str(vector)) == 0
    assert steering.SteeringVector.load(vector).layers == (2,)
    assert "not calibrated" in capsys.readouterr().out
    evaluation = ("--limit", "2", "--vector", str(vector), "--json", str(report))
    assert _run("eval", "mc2", *common, *evaluation) == 0
    written = json.loads(report.read_text())
    assert set(written) == {"plain", "vision", "text"}
    assert all(set(condition) >= FIELDS and condition["n"] == 2 for condition in written.values())
    assert "Vision Ratio" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_vector(root: Path, tmp_path: Path) -> None:
    model = str(families.checkpoint("qwen2_vl", root))
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path in paths:
        words = ("--samples", "3", "--calibration-samples", "2", "--layers", "1", "--quiet", "--out", str(path))
        assert _run("probe", "--model", model, "--device", "cpu", *words) == 0
    first, second = (steering.SteeringVector.load(path) for path in paths)
    torch.testing.assert_close(first.delta(1.0), second.delta(1.0), rtol=0, atol=0)
    assert first.info == second.info


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "mc2", "--vector", "nothing"), "There is no steering vector 'nothing'"),
        (("probe", "--mc2", "x.json"), "--mc2 needs --images"),
        (("probe", "--tasks", "sport"), "--tasks: unknown sport; there are color, shape"),
        (("probe", "--layers", "9", "--samples", "1"), "'layers' must be layer numbers from 0 to 2"),
        (("probe", "--name", "No Good"), "--name 'No Good' must match"),
    ],
)
def test_wrong_options_are_one_line(
    root: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(*words, "--model", str(families.checkpoint("qwen2_vl", root)), "--quiet", "--device", "cpu") == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert message in errors[-1]
    assert errors[-1].startswith("helmsight: ")
