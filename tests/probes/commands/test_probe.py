"""`helmsight probe` from the command line to its files, on a tiny random model."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import steering
from probes.answering.base import Question
from probes.vector.reliability import task_reliability
from server import cli
from server.engine.runtime import vector_store
from server.engine.served import Capabilities
from server.process.sources import load_settings
from tests.probes.command_line import demo_samples, last_error, run, strict, write_mc2
from tests.probes.conftest import shorten
from tests.server.fakes import FakeEngine

pytestmark = pytest.mark.usefixtures("loaded_once", "short_answers")

SMALL = ("--samples", "2", "--calibration-samples", "1", "--strengths", "0.3", "--layers", "1", "--states", "2")
LEAST = ("--samples", "1", "--no-calibrate", "--states", "0", "--force")
"""The least options that make a vector."""


def small(model: str, folder: Path) -> list[str]:
    """Return the words of a small probe with its files in that folder."""
    where = ["--report", str(folder / "report"), "--out", str(folder / "v.safetensors")]
    return ["probe", "--model", model, "--device", "cpu", "--quiet", *SMALL, *where]


@pytest.fixture
def probe(model: str, tmp_path: Path) -> list[str]:
    """Return the words of a small probe with its files in the test's folder."""
    return small(model, tmp_path)


@dataclass(frozen=True)
class Made:
    """A vector that a command has made, the command, its folder, and what it said."""

    vector: steering.SteeringVector
    words: list[str]
    folder: Path
    said: str

    @classmethod
    def by(cls, words: list[str], folder: Path) -> Made:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
            shorten(patch)
            assert run(*words) == 0
        return cls(steering.SteeringVector.load(folder / "v.safetensors"), words, folder, said.getvalue())


@pytest.fixture(scope="module")
def forced(model: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a calibrated vector in spite of doubts."""
    folder = tmp_path_factory.mktemp("forced")
    return Made.by([*small(model, folder), "--force"], folder)


def serving(vector: steering.SteeringVector) -> Capabilities:
    """Return the capabilities of an engine that serves the model for which the vector was made."""
    return replace(FakeEngine().capabilities, fingerprint=vector.fingerprint)


def test_a_random_model_gets_no_vector_but_a_report(
    probe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*probe, "--samples", "16") == 1
    said = last_error(capsys)
    report = strict(tmp_path / "report" / "report.json")
    assert said == (
        f"helmsight: No reliable direction, so {tmp_path / 'v.safetensors'} is not written (--force writes it anyway). "
        + " ".join(report["doubts"])
    )
    assert any(doubt.startswith("The model hardly follows the two instructions") for doubt in report["doubts"])
    assert any(doubt.startswith("Steering hardly moves the answers") for doubt in report["doubts"])
    assert not (tmp_path / "v.safetensors").exists()
    assert all(doubt in (tmp_path / "report" / "report.md").read_text() for doubt in report["doubts"])
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


def test_a_vector_that_is_forced_says_what_is_doubtful(forced: Made) -> None:
    made, report = forced.vector, forced.folder / "report"
    data = strict(report / "report.json")
    assert made.info["doubts"] == data["doubts"] != []
    assert made.info["reliable"] is False
    assert any(doubt.startswith("Steering hardly moves the answers") for doubt in data["doubts"])
    assert (made.info["samples"], made.info["calibration"]["samples"]) == (2, 1)
    assert made.layers == tuple(data["layers"]) == (1,)
    assert "NOT RELIABLE: " + " ".join(data["doubts"]) in forced.said
    assert f"report: {report / 'report.html'}" in forced.said


def test_a_vector_is_made_again_without_asking_and_replaced_where_that_is_asked_for(
    forced: Made, questions: list[Question]
) -> None:
    out, report = forced.folder / "v.safetensors", forced.folder / "report"
    kept = [json.loads(line)["key"] for line in (report / "answers.jsonl").read_text().splitlines()]
    assert kept
    first = {path: path.read_bytes() for path in report.iterdir()}
    stamp = (report / "states.safetensors").stat().st_mtime_ns
    out.write_bytes(b"old")
    assert run(*forced.words, "--replace") == 0
    assert questions == []
    assert (report / "states.safetensors").stat().st_mtime_ns == stamp
    assert {path: path.read_bytes() for path in report.iterdir()} == first
    same(forced.vector, steering.SteeringVector.load(out))


def same(one: steering.SteeringVector, other: steering.SteeringVector) -> None:
    everywhere = range(len(one.direction))
    torch.testing.assert_close(one.delta(1.0, everywhere), other.delta(1.0, everywhere), rtol=0, atol=0)
    assert (one.info, one.layers, one.fingerprint) == (other.info, other.layers, other.fingerprint)


@pytest.mark.usefixtures("undrawn")
def test_the_same_seed_gives_the_same_vector(forced: Made, probe: list[str], tmp_path: Path) -> None:
    assert run(*probe, "--states", "0", "--force") == 0  # of which the vector knows nothing
    same(forced.vector, steering.SteeringVector.load(tmp_path / "v.safetensors"))


@pytest.mark.usefixtures("undrawn")
def test_the_probe_of_a_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = write_mc2(tmp_path, 6), tmp_path / "v.safetensors"
    common = ("--model", model, "--device", "cpu", "--quiet", "--no-calibrate", "--states", "0", "--out", str(out))
    words = ("--samples", "5", "--report", str(tmp_path / "a"), "--layers", "2", "--force")
    assert run("probe", *common, *file, *words) == 0
    made = steering.SteeringVector.load(out)
    assert (made.info["samples"], made.info["tasks"]) == (5, ["color", "shape", "sport"])
    assert made.layers == (2,)
    assert "not calibrated" in capsys.readouterr().out
    assert "calibration" not in made.info
    assert "projection" not in strict(tmp_path / "a" / "report.json")


@pytest.fixture(scope="module")
def of_one_task(model: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """From the six samples of one task in a file, far fewer than are asked for; with a budget."""
    folder = tmp_path_factory.mktemp("file")
    where = ["--report", str(folder / "report"), "--out", str(folder / "v.safetensors")]
    words = ["--tasks", "sport", "--doses", "0.3", "--layers", "1", "--states", "0", "--force"]
    words += ["--budget", "kl=0.125", "others=0", *where]
    return Made.by(["probe", "--model", model, "--device", "cpu", "--quiet", *write_mc2(folder, 18), *words], folder)


def test_few_samples_are_shared_between_probe_and_calibration(of_one_task: Made) -> None:
    info = of_one_task.vector.info
    assert (info["samples"], info["calibration"]["samples"], info["tasks"]) == (4, 2, ["sport"])


def test_a_budget_reaches_the_calibration(of_one_task: Made) -> None:
    calibration = of_one_task.vector.info["calibration"]
    assert calibration["budget"] == {"others": 0, "accuracy": 0.03, "kl": 0.125, "repetition": 0.05}


@pytest.mark.usefixtures("no_model")
def test_a_folder_is_no_place_for_a_vector(
    probe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*probe, "--out", str(tmp_path)) == 1
    assert last_error(capsys) == f"helmsight: --out {tmp_path} is a folder; name a file"


def at_home(model: str, *words: str) -> int:
    """Run a probe on the real command line, without naming an output."""
    return cli.main(["probe", "--model", model, "--device", "cpu", "--quiet", "--layers", "1", *LEAST, *words])


def test_a_vector_goes_to_the_users_folder_where_every_command_finds_it(
    model: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(model).rglob("*"))
    assert at_home(model, "--use") == 0
    out = home / ".helmsight" / "vectors" / "modality-preference.safetensors"
    made = steering.SteeringVector.load(out)
    assert str(out) in capsys.readouterr().out
    assert stat.S_IMODE(out.parent.stat().st_mode) == 0o700
    assert sorted(Path(model).rglob("*")) == before  # nothing went into the model's folder

    served = vector_store(load_settings(environ={}), Path(model), serving(made)).get("modality-preference")
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
    assert at_home(model, "--name", "mine", "--use") == 0
    assert [path.name for path in (home / "first").glob("*.safetensors")] == ["mine.safetensors"]
    assert not (home / ".helmsight").exists()
    words = ("--conditions", "plain", "steer", "--limit", "1", "--vector", "mine", "--out", "mc2")
    assert cli.main(["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", *words]) == 0


@pytest.mark.usefixtures("no_model", "home")
def test_without_a_folder_of_vectors_the_file_must_be_named(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HELMSIGHT_VECTORS", "")
    assert at_home(model) == 1
    assert last_error(capsys) == "helmsight: there is no folder of vectors to save it in: give --out"


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("named", [False, True])
def test_a_vector_that_is_there_is_not_replaced_unasked_and_that_is_told_before_the_work(
    model: str, home: Path, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    out = home / "elsewhere.safetensors" if named else home / ".helmsight/vectors/modality-preference.safetensors"
    out.parent.mkdir(parents=True)
    out.write_bytes(b"calibrated for hours")
    assert at_home(model, *(("--out", str(out)) if named else ("--use",))) == 1
    assert last_error(capsys) == (
        f"helmsight: {out} already exists; --replace overwrites it, --name or --out names another file"
    )
    assert out.read_bytes() == b"calibrated for hours"
    assert not Path("build").exists()


@pytest.mark.usefixtures("undrawn")
def test_a_vector_that_came_while_the_probe_ran_is_not_replaced(
    probe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.safetensors"
    load = steering.load

    def slowly(*given: Any, **options: Any) -> steering.MLLM:
        out.write_bytes(b"another's")
        return load(*given, **options)

    monkeypatch.setattr(steering, "load", slowly)
    assert run(*probe, *LEAST) == 1
    assert "already exists" in last_error(capsys)
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
    served = vector_store(load_settings(environ={}), own, serving(fitting))
    assert torch.equal(served.get("modality-preference").direction, fitting.direction)
    assert served.read("modality-preference") == (own / "vectors" / "modality-preference.safetensors").read_bytes()

    capsys.readouterr()
    assert cli.main(["vectors", "list", "--model", str(own)]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [str(users.parent), str(own / "vectors")]
    # One of the same model does hide it.
    replace(foreign, fingerprint=fitting.fingerprint).save(users)
    assert torch.equal(served.get("modality-preference").direction, -fitting.direction)


def test_calibrations_are_kept_beside_the_vectors_and_not_replaced_unasked(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path(model).iterdir())
    words = ["probe", "--model", model, "--device", "cpu", "--quiet", "--samples", "2"]
    assert run(*words, "--calibrate-sage") == 0
    (file,) = (home / ".helmsight" / "vectors" / "calibrations").iterdir()
    first = json.loads(file.read_text())
    assert file.stem == first["fingerprint"]
    assert run(*words, "--calibrate-sinks") == 0  # which adds to it
    both = json.loads(file.read_text())
    assert (both["divergence"], first["sinks"]) == (first["divergence"], None)
    assert both["sinks"] is not None

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("prompts were run")

    with monkeypatch.context() as patch:
        patch.setattr("steering.front.engine.Engine.generate", refuse)
        for option, part in (("--calibrate-sage", "divergence"), ("--calibrate-sinks", "sinks")):
            assert run(*words, option) == 1
            assert last_error(capsys) == f"helmsight: {file} already has the {part}; --replace measures it again"
    assert json.loads(file.read_text()) == both
    assert run(*words, "--samples", "3", "--calibrate-sage", "--replace") == 0
    again = json.loads(file.read_text())
    assert (again["samples"], again["sinks"]) == (3, both["sinks"])
    assert sorted(Path(model).iterdir()) == before


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("part", ["kl", "kl=", "kl=much", "speed=1", "=1", "kl=-0.1", "kl=nan", "kl=inf", "kl=0.1=2"])
def test_a_budget_that_is_none_is_refused(probe: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*probe, "--budget", "others=0.5", part) == 1
    assert last_error(capsys) == (
        f"helmsight: --budget {part!r}: write NAME=LIMIT, with a name of accuracy, kl, others, repetition"
    )


@pytest.mark.usefixtures("undrawn")
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
    assert run(*probe, *LEAST, "--out", str(out), "--replace") == 1
    assert last_error(capsys).endswith(": No space left on device")
    assert out.read_bytes() == b"the old vector"
    assert list(out.parent.iterdir()) == [out]


def test_reliability_of_every_task(
    model: str, tiny: steering.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", model, "--device", "cpu", "--quiet", "--samples", "2", "--seed", "7")
    assert run("probe", "reliability", *words, "--json", str(tmp_path / "votes.json")) == 0
    written = strict(tmp_path / "votes.json")
    expected = {task: one.to_json() for task, one in task_reliability(tiny, demo_samples(2, 7), quiet=True).items()}
    assert list(written) == ["color", "shape", "all"]
    for task, one in expected.items():
        assert (written[task]["votes"], written[task]["rests_on"]) == (one["votes"], one["rests_on"])
        assert written[task]["drop_text"] == pytest.approx(one["drop_text"], rel=1e-3, abs=0)
    printed = capsys.readouterr().out
    assert "2 samples, both orders" in printed
    line = next(line for line in printed.splitlines() if line.startswith("│ all"))
    votes = [written["all"]["votes"].get(side, 0) for side in ("vision", "text", "none")]
    assert [int(cell) for cell in line.split("│")[2:5]] == votes
    assert sum(votes) == 4


# --------------------------------------------------------------------------------------------------- wrong options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("probe", "--mc2", "x.json"), "--mc2 needs --images"),
        (("probe", "--images", "."), "--images needs --mc2, the file of the samples that the images belong to"),
        (("probe", "--samples", "15", "--no-calibrate"), "There are too few samples: 15; at least 16 are needed."),
        (("probe", "--tasks", "sport"), "--tasks: unknown sport; there are color, shape"),
        (("probe", "--json", "x.json"), "--json goes with 'probe reliability'"),
        (("probe", "--base-url", "http://127.0.0.1:9"), "--base-url goes with 'probe reliability'"),
        (("probe", "--name", "No Good"), "--name 'No Good' must match"),
        (("probe", "--strengths", "1", "nan"), "--strengths nan: a strength must be positive and finite"),
        (("probe", "--strengths", "-1"), "--strengths -1: a strength must be positive and finite"),
        (
            ("probe", "--calibrate-sage", "--calibrate-sinks"),
            "--calibrate-sinks and --calibrate-sage are two measurements",
        ),
        (("probe", "--calibrate-flags", "--markdown", "."), ". is a folder; name a file"),
        (("probe", "--out", "/proc/x.safetensors", "--replace"), "/proc cannot be written to"),
        (("probe", "reliability", "--json", "."), ". is a folder; name a file"),
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
    assert run(*probe, "--layers", "9", "--samples", "1", "--force") == 1
    assert "'layers' must be layer numbers from 0 to 2" in last_error(capsys)
