"""`helmsight probe` and `helmsight eval mc2` from the command line to their files, on a tiny random model."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch
from PIL import Image

import steering
from probes import automatic, command, evaluate
from probes.answering import InProcess, Question, Reply
from probes.automatic import task_reliability
from probes.build import build
from probes.commands import common, mc2
from probes.commands.common import Defaults, samples_of
from probes.mc2 import SIDES, Sample, messages
from server import cli
from server.process.runtime import vector_store
from server.settings import load_settings
from tests import families
from tests.probes.conftest import make_samples
from tests.probes.test_evaluate import said, simple_vector

SIDED = {f"{kind}_{side}" for kind in ("instruct", "chain", "shots") for side in SIDES}
FIELDS = {"s_vision", "s_text", "s_others", "vision_ratio", "n"}
SMALL = ("--samples", "4", "--calibration-samples", "2", "--doses", "0.3", "--layers", "1", "--states", "2")


def demo_samples(count: int, seed: int) -> list[Sample]:
    return make_samples(count, shade=seed % 256)


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers(required=True), demo_samples=demo_samples, default_model="nothing")
    arguments = parser.parse_args([str(word) for word in words])
    return int(arguments.func(arguments))


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(families.checkpoint("qwen2_vl", root))


@pytest.fixture(scope="module")
def vector(tiny: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A vector of the tiny model in a file."""
    made = build(tiny, make_samples(3), name="made", layers=[1], quiet=True)
    return str(made.save(tmp_path_factory.mktemp("vector") / "made.safetensors"))


@pytest.fixture
def probe(model: str, tmp_path: Path) -> list[str]:
    """A small probe with its files in the test's folder."""
    where = ["--report", str(tmp_path / "report"), "--out", str(tmp_path / "v.safetensors")]
    return ["probe", "--model", model, "--device", "cpu", "--quiet", *SMALL, *where]


@pytest.fixture
def evaluation(model: str, vector: str, tmp_path: Path) -> list[str]:
    """A small evaluation with its files in the test's folder."""
    where = ["--vector", vector, "--out", str(tmp_path / "mc2")]
    return ["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", "--limit", "2", *where]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Every question that the model itself is asked."""
    asked: list[Question] = []
    answers = InProcess.answers

    def kept(self: InProcess, given: Iterable[Question]) -> Iterator[Reply]:
        def passed() -> Iterator[Question]:
            for question in given:
                asked.append(question)
                yield question

        return answers(self, passed())

    monkeypatch.setattr(InProcess, "answers", kept)
    return asked


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint may be loaded: what is wrong must be told before."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(steering, "load", refuse)


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a failed command ends with."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def strict(path: Path) -> dict[str, Any]:
    """A JSON file without NaN or infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return dict(json.loads(path.read_text(), parse_constant=refuse))


def write_mc2(folder: Path, count: int) -> list[str]:
    """A file of so many rows, tasks in turn, with its images; and the options that name them."""
    images = folder / "coco" / "val2014"
    images.mkdir(parents=True)
    rows = []
    for number in range(count):
        Image.new("RGB", (56, 56), (number, 5, 90)).save(images / f"COCO_val2014_{number:012}.jpg")
        rows.append({
            "image_id": f"{number:012}", "task": ("color", "sport", "shape")[number % 3],
            "question": f"What color is ball {number}?", "answer_vision": "red", "answer_text": "blue",
            "context": f"Ball {number} is blue.",
        })  # fmt: skip
    (folder / "mc2.json").write_text(json.dumps(rows))
    return ["--mc2", str(folder / "mc2.json"), "--images", str(folder / "coco")]


# ----------------------------------------------------------------------------------------------------------- probe


def test_a_random_model_gets_no_vector_but_a_report(
    probe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*probe) == 1
    said = last_error(capsys)
    report = strict(tmp_path / "report" / "report.json")
    assert said == (
        f"helmsight: No reliable direction, so {tmp_path / 'v.safetensors'} is not written (--force writes it anyway). "
        + " ".join(report["doubts"])
    )
    assert any(doubt.startswith("The model hardly follows the two instructions") for doubt in report["doubts"])
    assert "calibration" not in report["info"]  # which would have taken most of the time
    assert not (tmp_path / "v.safetensors").exists()
    assert all(doubt in (tmp_path / "report" / "report.md").read_text() for doubt in report["doubts"])
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_a_vector_that_is_forced_says_what_is_doubtful_and_is_made_again_without_asking(
    probe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    out, report = tmp_path / "v.safetensors", tmp_path / "report"
    assert run(*probe, "--force") == 0
    made, data = steering.SteeringVector.load(out), strict(report / "report.json")
    assert made.info["doubts"] == data["doubts"] != []
    assert made.info["reliable"] is False
    assert any(doubt.startswith("Steering hardly moves the answers") for doubt in data["doubts"])
    assert (made.info["samples"], made.info["calibration"]["samples"]) == (4, 2)
    assert made.layers == tuple(data["layers"]) == (1,)
    printed = capsys.readouterr().out
    assert "NOT RELIABLE: " + " ".join(data["doubts"]) in printed
    assert f"report: {report / 'report.html'}" in printed

    assert questions
    questions.clear()
    first = {path: path.read_bytes() for path in report.iterdir()}
    stamp = (report / "states.safetensors").stat().st_mtime_ns
    out.unlink()
    assert run(*probe, "--force") == 0
    assert questions == []
    assert (report / "states.safetensors").stat().st_mtime_ns == stamp
    assert {path: path.read_bytes() for path in report.iterdir()} == first
    same(made, steering.SteeringVector.load(out))


def same(one: steering.SteeringVector, other: steering.SteeringVector) -> None:
    everywhere = range(len(one.direction))
    torch.testing.assert_close(one.delta(1.0, everywhere), other.delta(1.0, everywhere), rtol=0, atol=0)
    assert (one.info, one.layers, one.fingerprint) == (other.info, other.layers, other.fingerprint)


def test_the_probe_of_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_mc2(tmp_path, 12), tmp_path / "v.safetensors"
    common = ("--model", model, "--device", "cpu", "--quiet", "--no-calibrate", "--states", "0", "--out", str(out))
    words = ("--samples", "8", "--report", str(tmp_path / "a"), "--layers", "2", "--force")
    assert run("probe", *common, *file, *words) == 0
    made = steering.SteeringVector.load(out)
    assert (made.info["samples"], made.info["tasks"]) == (8, ["color", "shape", "sport"])
    assert made.layers == (2,)
    assert "not calibrated" in capsys.readouterr().out
    assert "calibration" not in made.info
    assert "projection" not in strict(tmp_path / "a" / "report.json")
    words = ("--samples", "9", "--tasks", "sport", "--report", str(tmp_path / "b"), "--force", "--replace")
    assert run("probe", *common, *file, *words) == 0
    made = steering.SteeringVector.load(out)
    assert (made.info["samples"], made.info["tasks"]) == (4, ["sport"])


def test_few_samples_are_shared_between_probe_and_calibration(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = write_mc2(tmp_path, 7), tmp_path / "v.safetensors"
    words = ("--doses", "0.3", "--layers", "1", "--states", "0", "--report", str(tmp_path / "a"), "--force")
    assert run("probe", "--model", model, "--device", "cpu", "--quiet", *file, *words, "--out", str(out)) == 0
    made = steering.SteeringVector.load(out)
    assert (made.info["samples"], made.info["calibration"]["samples"]) == (5, 2)


def test_the_same_seed_gives_the_same_vector(model: str, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        where = ("--out", str(tmp_path / f"{name}.safetensors"), "--report", str(tmp_path / name), "--states", "0")
        assert run("probe", "--model", model, "--device", "cpu", "--quiet", *SMALL, *where, "--force") == 0
        made.append(steering.SteeringVector.load(tmp_path / f"{name}.safetensors"))
    same(*made)


@pytest.mark.usefixtures("no_model")
def test_a_folder_is_no_place_for_a_vector(
    probe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*probe, "--out", str(tmp_path)) == 1
    assert last_error(capsys) == f"helmsight: --out {tmp_path} is a folder; name the file"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of the test's own, where the probe writes unless it is told otherwise."""
    for name in ("HELMSIGHT_VECTORS", "HELMSIGHT_CONFIG", "HELMSIGHT_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def at_home(model: str, *words: str) -> int:
    """A probe that is not told where to write, from the real command line."""
    small = (*SMALL, "--no-calibrate", "--states", "0", "--force")
    return cli.main(["probe", "--model", model, "--device", "cpu", "--quiet", *small, *words])


def test_a_vector_goes_to_the_users_folder_where_every_command_finds_it(
    model: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(model).rglob("*"))
    assert at_home(model) == 0
    out = home / ".helmsight" / "vectors" / "modality-preference.safetensors"
    made = steering.SteeringVector.load(out)
    assert str(out) in capsys.readouterr().out
    assert stat.S_IMODE(out.parent.stat().st_mode) == 0o700
    assert sorted(Path(model).rglob("*")) == before  # nothing went into the model's folder

    served = vector_store(load_settings(environ={}), Path(model), made.fingerprint).get("modality-preference")
    assert torch.equal(served.direction, made.direction)
    assert cli.main(["vectors", "list", "--model", model]) == 0
    _, line = capsys.readouterr().out.splitlines()  # behind the header
    assert line.split()[0] == "modality-preference"
    assert made.fingerprint[:16] in line
    words = ("--conditions", "plain", "steer", "--limit", "1", "--out", "mc2")
    assert cli.main(["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", *words]) == 0
    assert strict(Path("mc2/report.json"))["about"]["vector"] == "modality-preference"


def test_the_folder_of_the_settings_is_written_to_and_read(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELMSIGHT_VECTORS", f"{home / 'first'},{home / 'second'}")
    assert at_home(model, "--name", "mine") == 0
    assert [path.name for path in (home / "first").iterdir()] == ["mine.safetensors"]
    assert not (home / ".helmsight").exists()
    words = ("--conditions", "plain", "steer", "--limit", "1", "--vector", "mine", "--out", "mc2")
    assert cli.main(["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", *words]) == 0


@pytest.mark.usefixtures("no_model", "home")
def test_without_a_folder_of_vectors_the_file_must_be_named(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELMSIGHT_VECTORS", "")
    assert at_home(model) == 1
    assert last_error(capsys) == "helmsight: there is no folder of vectors to put it into: give --out"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("named", [False, True])
def test_a_vector_that_is_there_is_not_replaced_unasked_and_that_is_told_before_the_work(
    model: str, home: Path, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = home / "elsewhere.safetensors" if named else home / ".helmsight/vectors/modality-preference.safetensors"
    out.parent.mkdir(parents=True)
    out.write_bytes(b"calibrated for hours")
    assert at_home(model, *(("--out", str(out)) if named else ())) == 1
    assert last_error(capsys) == (
        f"helmsight: {out} exists already; --replace writes over it, --name or --out names another file"
    )
    assert out.read_bytes() == b"calibrated for hours"
    assert not Path("build").exists()


def test_a_vector_is_replaced_where_that_is_asked_for(probe: list[str], tmp_path: Path) -> None:
    out = tmp_path / "v.safetensors"
    out.write_bytes(b"old")
    assert run(*probe, "--no-calibrate", "--states", "0", "--force", "--replace") == 0
    assert steering.SteeringVector.load(out).name == "modality-preference"


def test_a_vector_that_came_while_the_probe_ran_is_not_replaced(
    probe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.safetensors"
    load = steering.load

    def slowly(*given: Any, **options: Any) -> steering.MLLM:
        out.write_bytes(b"another's")
        return load(*given, **options)

    monkeypatch.setattr(steering, "load", slowly)
    assert run(*probe, "--no-calibrate", "--states", "0", "--force") == 1
    assert "exists already" in last_error(capsys)
    assert out.read_bytes() == b"another's"


def test_a_vector_of_the_user_for_another_model_does_not_hide_that_of_the_model(
    model: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = home / "model"
    shutil.copytree(model, own, ignore=shutil.ignore_patterns("vectors"))
    assert at_home(str(own), "--out", str(own / "vectors" / "modality-preference.safetensors")) == 0
    fitting = steering.SteeringVector.load(own / "vectors" / "modality-preference.safetensors")
    foreign = replace(fitting, direction=-fitting.direction, fingerprint="f" * 32, info={"made_from": ["elsewhere"]})
    users = foreign.save(home / ".helmsight" / "vectors" / "modality-preference.safetensors")

    # As the evaluation finds it: the samples that it was made from are left out of the foreign one, were it taken.
    words = ("--conditions", "plain", "steer", "--limit", "1", "--out", "mc2")
    assert cli.main(["eval", "mc2", "--model", str(own), "--device", "cpu", "--quiet", *words]) == 0
    served = vector_store(load_settings(environ={}), own, fitting.fingerprint)
    assert torch.equal(served.get("modality-preference").direction, fitting.direction)
    assert served.read("modality-preference") == (own / "vectors" / "modality-preference.safetensors").read_bytes()

    capsys.readouterr()
    assert cli.main(["vectors", "list", "--model", str(own)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(users.parent), str(own / "vectors")]
    # One of the same model does hide it.
    replace(foreign, fingerprint=fitting.fingerprint).save(users)
    assert torch.equal(served.get("modality-preference").direction, -fitting.direction)


def test_a_calibration_that_is_there_is_not_replaced_unasked(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("calibration.json"))
    words = ["probe", "--model", str(folder), "--device", "cpu", "--quiet", "--samples", "2"]
    assert run(*words, "--calibrate-sage") == 0
    first = json.loads((folder / "calibration.json").read_text())
    assert run(*words, "--calibrate-sinks") == 0  # which adds to it
    both = json.loads((folder / "calibration.json").read_text())
    assert (both["divergence"], first["sinks"]) == (first["divergence"], None)
    assert both["sinks"] is not None

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(steering, "load", refuse)
        for option, part in (("--calibrate-sage", "divergence"), ("--calibrate-sinks", "sinks")):
            assert run(*words, option) == 1
            assert last_error(capsys) == (
                f"helmsight: {folder / 'calibration.json'} has the {part} already; --replace measures it anew"
            )
    assert json.loads((folder / "calibration.json").read_text()) == both
    assert run(*words, "--samples", "3", "--calibrate-sage", "--replace") == 0
    again = json.loads((folder / "calibration.json").read_text())
    assert (again["samples"], again["sinks"]) == (3, both["sinks"])


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("part", ["kl", "kl=", "kl=much", "speed=1", "=1", "kl=-0.1", "kl=nan", "kl=inf", "kl=0.1=2"])
def test_a_budget_that_is_none_is_refused(probe: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*probe, "--budget", "others=0.5", part) == 1
    assert last_error(capsys) == (
        f"helmsight: --budget {part!r}: write NAME=MOST, with a name of accuracy, kl, others, repetition"
    )


def test_a_budget_reaches_the_calibration(probe: list[str], tmp_path: Path) -> None:
    assert run(*probe, "--states", "0", "--budget", "kl=0.125", "others=0", "--force") == 0
    calibration = steering.SteeringVector.load(tmp_path / "v.safetensors").info["calibration"]
    assert calibration["budget"] == {"others": 0, "accuracy": 0.03, "kl": 0.125, "repetition": 0.05}


@pytest.mark.parametrize("failing", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_vector(
    probe: list[str], tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "vectors" / "v.safetensors"
    out.parent.mkdir()
    out.write_bytes(b"the old vector")
    real = getattr(os, failing)

    def full(what: Any, *more: Any) -> Any:
        path = more[0] if failing == "replace" else os.readlink(f"/proc/self/fd/{what}")
        if Path(path).parent == out.parent:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(what, *more)

    monkeypatch.setattr(os, failing, full)
    assert run(*probe, "--no-calibrate", "--states", "0", "--out", str(out), "--force", "--replace") == 1
    assert last_error(capsys).startswith("helmsight: [Errno 28] No space left on device: ")
    assert out.read_bytes() == b"the old vector"
    assert list(out.parent.iterdir()) == [out]


# ----------------------------------------------------------------------------------------------------- reliability


def test_reliability_of_every_task(
    model: str, tiny: steering.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", model, "--device", "cpu", "--quiet", "--samples", "3", "--seed", "7")
    assert run("probe", "reliability", *words, "--json", str(tmp_path / "votes.json")) == 0
    written = strict(tmp_path / "votes.json")
    expected = {task: one.to_json() for task, one in task_reliability(tiny, demo_samples(3, 7), quiet=True).items()}
    assert list(written) == ["color", "shape", "all"]
    for task, one in expected.items():
        assert (written[task]["votes"], written[task]["rests_on"]) == (one["votes"], one["rests_on"])
        assert written[task]["drop_text"] == pytest.approx(one["drop_text"], rel=1e-3, abs=0)
    printed = capsys.readouterr().out
    assert "3 samples, both orders" in printed
    line = next(line for line in printed.splitlines() if line.startswith("│ all"))
    votes = [written["all"]["votes"].get(side, 0) for side in ("vision", "text", "none")]
    assert [int(cell) for cell in line.split("│")[2:5]] == votes
    assert sum(votes) == 6


# -------------------------------------------------------------------------------------------------------- eval mc2


def test_all_five_conditions(
    evaluation: list[str], tmp_path: Path, vector: str, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    assert (
        run(*evaluation, "--random-directions", "2", "--strength", "0.5", "--json", str(tmp_path / "shares.json")) == 0
    )
    report = strict(tmp_path / "mc2" / "report.json")
    assert set(report) == {"about", "conditions"}
    assert report["about"].items() >= {"samples": 2, "seed": 0, "mc2": False, "vector": "made", "strength": 0.5}.items()
    conditions = report["conditions"]
    assert set(conditions) == {"plain", "vision", "text", "advantages", "random", *SIDED}
    for name in ("plain", "vision", "text", *SIDED):
        assert set(conditions[name]) >= FIELDS
        assert conditions[name]["n"] == 2
        assert 0 < conditions[name]["attention_ratio"] < 1
        assert set(conditions[name]["by_task"]) == {"color", "shape"}
    assert strict(tmp_path / "shares.json") == conditions
    printed = capsys.readouterr().out
    assert "four-shot toward text" in printed
    assert f"report: {tmp_path / 'mc2' / 'report.html'}" in printed
    assert len(questions) == (9 + 3 * 2 + 2) * 2 * 2
    known = steering.SteeringVector.load(vector)
    pushed = [one.push.vector for one in questions if one.push and one.push.vector.name == "made"]
    assert all(torch.equal(one.direction, known.direction) for one in pushed)
    assert {one.push.strength for one in questions if one.push} == {0.5}


def test_the_solved_examples_are_other_samples(evaluation: list[str], questions: list[Question]) -> None:
    assert run(*evaluation, "--conditions", "plain", "shots") == 0
    asked = {id(one): one.chat[-1]["content"][-1]["text"].split("\n")[0] for one in questions}
    shown = {turn["content"][1]["text"].split("\n")[0] for one in questions for turn in one.chat[:-1:2]}
    assert len(shown) == 4
    assert shown.isdisjoint(asked.values())


def test_an_evaluation_of_a_file(
    evaluation: list[str], tmp_path: Path, questions: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    file = write_mc2(tmp_path, 9)
    words = ("--conditions", "plain", "--tasks", "sport", "color", "--limit", "20")
    assert run(*evaluation, *file, *words) == 0
    report = strict(tmp_path / "mc2" / "report.json")
    assert report["about"]["mc2"] is True
    assert set(report["conditions"]["plain"]["by_task"]) == {"sport", "color"}
    assert report["conditions"]["plain"]["n"] == report["about"]["samples"] == 6
    assert "There are 6 samples, 20 were asked for." in caplog.text
    assert len(questions) == 6 * 3 * 2


def test_a_repeated_evaluation_asks_only_what_is_new(
    evaluation: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    assert run(*evaluation, "--conditions", "plain", "steer") == 0
    assert len(questions) == 2 * 2 * (1 + 2 + 3 * 2)
    first = (tmp_path / "mc2" / "report.json").read_bytes()
    questions.clear()
    assert run(*evaluation, "--conditions", "plain", "steer") == 0
    assert questions == []
    assert (tmp_path / "mc2" / "report.json").read_bytes() == first
    assert run(*evaluation, "--conditions", "plain", "instruct", "steer") == 0
    assert len(questions) == 2 * 2 * 2
    assert all("In case there is an inconsistency" in one.chat[0]["content"][1]["text"] for one in questions)


@pytest.mark.slow
def test_ablations_and_the_automatic_direction(
    evaluation: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.commands.mc2.PROBED", 50)
    words = ("--ablate", "samples", "tasks", "strength", "latency", "--auto", "drop", "--severity", "0.5", "0.75")
    assert run(*evaluation, "--conditions", "plain", "steer", *words) == 0
    report = strict(tmp_path / "mc2" / "report.json")
    assert set(report) == {"about", "conditions", "samples", "tasks", "strength", "latency", "auto"}
    assert set(report["samples"]) == {"25", "50"}
    assert set(report["tasks"]) == {"color", "shape", "all tasks"}
    rows = report["strength"]["rows"]
    assert {"0", "0.125", "1", "3"} <= set(rows)
    assert all(set(row) == {"vision", "text"} and row["text"]["n"] == 2 for row in rows.values())
    for side in SIDES:  # strength 1 is the condition, strength 0 the plain one
        for name in FIELDS:
            assert rows["1"][side][name] == report["conditions"][side][name]
            assert rows["0"][side][name] == report["conditions"]["plain"][name]
    assert set(report["strength"]["knee"]) == {"strength", "slope_before", "slope_after", "breaks_at", "visible"}
    assert set(report["latency"]) == {"plain", "probing", "steering"}
    assert (report["auto"]["severities"], report["auto"]["bounds"]) == ([0.5, 0.75], {"drop": None})
    assert {row["criterion"] for row in report["auto"]["rows"]} == {"drop"}
    written = (tmp_path / "mc2" / "report.md").read_text()
    for table in ("Table 8", "Table 9", "Table 10", "Table 11", "Table 12"):
        assert f"({table})" in written


@pytest.fixture
def own_model(model: str, tmp_path: Path) -> str:
    """A copy of the model, which a calibration is written into."""
    return str(shutil.copytree(model, tmp_path / "own"))


def test_surprise_is_calibrated_and_then_evaluated(
    own_model: str, vector: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    given = ("--model", own_model, "--device", "cpu", "--quiet")
    words = ("--conditions", "plain", "steer", "--auto", "surprise", "--severity", "1")
    evaluated = ("eval", "mc2", *given, "--vector", vector, "--limit", "2", "--out", str(tmp_path / "mc2"), *words)
    assert run(*evaluated) == 1
    assert "'helmsight probe --calibrate-surprise'" in last_error(capsys)
    assert questions == []
    assert run("probe", *given, "--samples", "5", "--calibrate-surprise") == 0
    kept = strict(Path(own_model) / "calibration.json")
    assert f"98% of 10 contexts surprise by at most {kept['surprise']:.2f} nats" in capsys.readouterr().out
    engine = steering.Engine(steering.load(own_model, device="cpu"), slots=4)
    samples = demo_samples(5, common.PROBE_SEEDS)
    chats = [messages(sample, "plain", swapped) for sample in samples for swapped in (False, True)]
    values = [value for value, _ in steering.surprises(engine, chats)]
    assert kept["surprise"] == pytest.approx(float(np.quantile([v for v in values if v is not None], 0.98)), rel=1e-3)
    assert run(*evaluated) == 0
    report = strict(tmp_path / "mc2" / "report.json")["auto"]
    assert report["bounds"] == dict.fromkeys(("surprise", "surprise, one degraded"), kept["surprise"])
    assert {row["decided"] for row in report["rows"] if row["criterion"] == "surprise, one degraded"} == {1}


def test_a_probe_of_an_ablation_never_meets_the_evaluated_samples(tmp_path: Path) -> None:
    _, json_path, _, images = write_mc2(tmp_path, 30)
    for tasks in (None, ["sport"]):
        given = argparse.Namespace(mc2=json_path, images=images, tasks=tasks, seed=3)
        whole = samples_of(given, Defaults(), 30, 3)
        assert len(whole) == (10 if tasks else 30)
        evaluated = samples_of(given, Defaults(), 6, 3)
        probed = samples_of(given, Defaults(), 20, 3, without=[one.id for one in evaluated])
        assert len(evaluated) == 6
        assert {one.id for one in probed}.isdisjoint(one.id for one in evaluated)
        assert {one.id for one in probed} == {one.id for one in whole[6:26]}
    other = samples_of(argparse.Namespace(mc2=json_path, images=images, tasks=None, seed=4), Defaults(), 30, 4)
    first = samples_of(argparse.Namespace(mc2=json_path, images=images, tasks=None, seed=3), Defaults(), 30, 3)
    assert [one.id for one in other] != [one.id for one in first]
    assert {one.id for one in other} == {one.id for one in first}


def test_the_command_offers_the_conditions_that_there_are() -> None:
    assert mc2.KINDS == evaluate.KINDS
    assert mc2.CRITERIA == steering.CRITERIA
    assert mc2.SEVERITIES == automatic.SEVERITIES


def test_what_a_vector_was_made_from_is_not_asked(model: str, tmp_path: Path, questions: list[Question]) -> None:
    data = ("--model", model, "--device", "cpu", "--quiet", *write_mc2(tmp_path, 12))
    vector = tmp_path / "v.safetensors"
    words = (
        "--samples",
        "5",
        "--calibration-samples",
        "2",
        "--layers",
        "1",
        "--doses",
        "0.3",
        "--states",
        "0",
        "--force",
    )
    assert run("probe", *data, *words, "--out", str(vector), "--report", str(tmp_path / "probe")) == 0
    made_from = steering.SteeringVector.load(vector).info["made_from"]
    assert len(set(made_from)) == 7
    questions.clear()
    more = ("--conditions", "plain", "steer", "--limit", "12", "--vector", str(vector), "--out", str(tmp_path / "mc2"))
    assert run("eval", "mc2", *data, *more) == 0
    assert strict(tmp_path / "mc2" / "report.json")["about"]["samples"] == 5
    asked = " ".join(str(part) for one in questions for part in one.chat[0]["content"])
    used = {int(name.rsplit("-", 1)[1]) for name in made_from}
    assert {number for number in range(12) if f"Ball {number} is blue." in asked} == set(range(12)) - used


@pytest.mark.slow
def test_a_killed_evaluation_goes_on_where_it_was(
    model: str, vector: str, tmp_path: Path, questions: list[Question], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", "--threads", "1", "--vector", vector]
    words += ["--limit", "6", "--seed", "2", "--conditions", "plain", "steer"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    answers = killed / "answers.jsonl"
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli", *words, "--out", str(killed)],
        cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not answers.exists() or answers.read_bytes().count(b"\n") < 12:
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    kept = answers.read_bytes()
    early = kept[: kept.rindex(b"\n") + 1]
    assert not (killed / "report.json").exists()

    assert cli.main([*words, "--out", str(killed)]) == 0
    total = 6 * 2 * (1 + 2 + 3 * 2)
    assert len(questions) == total - early.count(b"\n")
    assert answers.read_bytes().startswith(early)
    keys = [json.loads(line)["key"] for line in answers.read_bytes().splitlines()]
    assert len(set(keys)) == len(keys) == total

    assert cli.main([*words, "--out", str(whole)]) == 0
    resumed, uninterrupted = strict(killed / "report.json"), strict(whole / "report.json")
    for name, condition in uninterrupted["conditions"].items():
        if name != "advantages":  # the last bits depend on what else was in the batch
            ratio = resumed["conditions"][name].pop("attention_ratio")
            assert ratio == pytest.approx(condition.pop("attention_ratio"), abs=1e-6)
    assert resumed == uninterrupted
    assert (killed / "report.md").read_bytes() == (whole / "report.md").read_bytes()


def test_a_full_disk_leaves_the_old_report_and_keeps_the_answers(
    evaluation: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    questions: list[Question],
) -> None:  # fmt: skip
    report = tmp_path / "mc2" / "report.json"
    report.parent.mkdir()
    report.write_text("the old report")
    words = [*evaluation, "--conditions", "plain"]
    with monkeypatch.context() as patch:

        def full(*_: object) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "replace", full)
        assert run(*words) == 1
    assert last_error(capsys) == "helmsight: [Errno 28] No space left on device"
    assert report.read_text() == "the old report"
    assert {path.name for path in report.parent.iterdir()} == {"report.json", "answers.jsonl"}
    questions.clear()
    assert run(*words) == 0
    assert questions == []
    assert strict(report)["about"]["samples"] == 2


class Server:
    """Stands in for `probes.endpoint.Endpoint`: it answers toward its push, plainly toward the image."""

    made: ClassVar[list[tuple[str, str | None]]] = []
    identity = "a server"

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        self.made.append((base_url, model))

    def vector(self, name: str) -> steering.SteeringVector:
        return simple_vector(name)

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            push, text = question.push, question.chat[-1]["content"][-1]["text"]
            assert push is None or push.vector.name == "served"
            side = "text" if push is not None and push.toward == "text" else "vision"
            yield Reply(said(side[0], "A. blue" in text), 0.25, {"toward": side})


@pytest.mark.usefixtures("no_model")
def test_a_server_is_asked_in_place_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.endpoint.Endpoint", Server)
    monkeypatch.setattr(Server, "made", [])
    words = ["eval", "mc2", "--base-url", "http://there/v1", "--quiet", "--limit", "2", "--vector", "served"]
    words += ["--conditions", "plain", "steer", "--out", str(tmp_path), "--ablate", "strength", "--auto"]
    assert run(*words) == 0
    report = strict(tmp_path / "report.json")
    assert report["about"]["model"] == "http://there/v1"
    assert report["about"]["vector"] == "served"
    assert {name: one["vision_ratio"] for name, one in report["conditions"].items()} == {
        "plain": 1, "vision": 1, "text": 0,
    }  # fmt: skip
    assert report["strength"]["rows"]["2"]["text"]["s_text"] == 1
    assert report["auto"]["criteria"] == ["drop", "surprise", "surprise, one degraded"]
    prior = {row["degraded"]: row["prior"] for row in report["auto"]["rows"]}
    assert (prior["image"], prior["text"]) == (1, 1)
    assert run(*words, "--model", "its-model") == 0
    assert Server.made == [("http://there/v1", None), ("http://there/v1", "its-model")]


# --------------------------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "mc2", "--vector", "nothing"), "There is no steering vector 'nothing'"),
        (
            ("eval", "mc2", "--limit", "1", "--conditions", "plain", "--ablate", "strength"),
            "go with the condition 'steer'",
        ),
        (("eval", "mc2", "--conditions", "plain", "--auto"), "go with the condition 'steer'"),
        (("eval", "mc2", "--conditions", "plain", "--random-directions", "2"), "go with the condition 'steer'"),
        (("eval", "mc2", "--severity", "1.5"), "--severity must be from 0 to 1, not 1.5"),
        (("eval", "mc2", "--severity", "0.5", "nan"), "--severity must be from 0 to 1, not nan"),
        (
            ("eval", "mc2", "--conditions", "plain", "--tasks", "sport"),
            "--tasks: unknown sport; there are color, shape",
        ),
        (
            ("eval", "mc2", "--conditions", "plain", "--mc2", "nothing.json", "--images", "."),
            "No such file or directory: 'nothing.json'",
        ),
        (("probe", "--mc2", "x.json"), "--mc2 needs --images"),
        (("probe", "--tasks", "sport"), "--tasks: unknown sport; there are color, shape"),
        (("probe", "--json", "x.json"), "--json goes with 'probe reliability'"),
        (("probe", "--name", "No Good"), "--name 'No Good' must match"),
        (("probe", "reliability", "--tasks", "sport"), "--tasks: unknown sport"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_wrong_options_are_one_line(
    model: str, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, "--model", model, "--quiet", "--device", "cpu") == 1
    error = last_error(capsys)
    assert error.startswith("helmsight: ")
    assert message in error


def test_layers_that_the_model_lacks_are_one_line(probe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*probe, "--layers", "9", "--samples", "1") == 1
    assert "'layers' must be layer numbers from 0 to 2" in last_error(capsys)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("ablations", [("samples",), ("strength", "tasks"), ("latency",)])
def test_what_needs_the_model_here_is_refused_with_a_server(
    evaluation: list[str], ablations: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing listens at that address: it must not even be asked.
    assert run(*evaluation, "--base-url", "http://127.0.0.1:9", "--ablate", *ablations) == 1
    named = next(one for one in ablations if one != "strength")
    assert last_error(capsys) == f"helmsight: --ablate {named} needs the model in this process, not --base-url"
    assert not (tmp_path / "mc2").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_file_that_is_too_small_for_four_shot_is_one_line(
    evaluation: list[str], tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*evaluation, *write_mc2(tmp_path, count)) == 1
    assert last_error(capsys) == f"helmsight: {count} samples are too few."


def test_a_small_file_keeps_four_examples_back(
    evaluation: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    assert run(*evaluation, *write_mc2(tmp_path, 6), "--limit", "5", "--conditions", "plain", "shots") == 0
    assert strict(tmp_path / "mc2" / "report.json")["about"]["samples"] == 2
    assert {len(one.chat) for one in questions} == {1, 9}


def test_without_a_demo_world_a_file_is_needed() -> None:
    with pytest.raises(ValueError, match="--mc2 is needed"):
        samples_of(argparse.Namespace(mc2=None, seed=0), common.Defaults(), 1, 0)


@pytest.mark.parametrize(
    "words", [("probe", "--samples", "0"), ("eval", "mc2", "--limit", "-1"), ("probe", "--slots", "x")]
)
def test_counts_must_be_positive(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(*words, "--model", "nothing")
    assert words[-2] in capsys.readouterr().err
