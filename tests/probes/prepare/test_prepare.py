"""`helmsight prepare` on the embedded model without its vector and its calibrations."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import steering
from demo.draws import DRAWS
from probes.calibration import run as calibration
from probes.conflicts.options import Data
from probes.harness.options import Defaults, ModelOptions
from probes.prepare import run as preparing
from probes.prepare.run import PrepareOptions
from server import cli
from steering.model.calibration import PARTS as MEASURED
from steering.model.calibration import Calibration
from steering.readiness import PARTS, states, table
from tests.server.fakes import checkpoint

pytestmark = pytest.mark.usefixtures("undrawn", "few_resamples")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("vectors", "calibration.json"))
    return folder


@pytest.fixture
def options(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PrepareOptions:
    model = ModelOptions(str(bare), device="cpu", threads=1, vectors=lambda: [tmp_path / "vectors"])
    data = Data(demo=DRAWS["conflicts"])
    engine = steering.Engine
    monkeypatch.setattr(steering, "Engine", lambda *given, **more: engine(*given, **more, self_check=False))
    return PrepareOptions(model, data, 16, 2, 160, None, (), tmp_path / "reports", quiet=True, strengths=(1.0,))


def prepared(options: PrepareOptions) -> bool:
    return preparing.run(options, Defaults(draw=DRAWS))


def calibration_of(options: PrepareOptions) -> Calibration | None:
    mllm = steering.load(options.model.path, device="cpu", calibrations=options.model.calibrations)
    return mllm.calibration


def test_everything_that_lacks_is_measured_and_an_interrupted_run_continues(
    options: PrepareOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, measured = calibration.run, list[str]()

    def interrupted(given: calibration.CalibrationOptions) -> None:
        measured.append(given.part)
        if measured == ["sage", "sinks"]:
            raise KeyboardInterrupt
        measure(given)

    monkeypatch.setattr(calibration, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepared(options)
    known = calibration_of(options)
    assert known is not None
    assert known.parts == ("divergence",)
    capsys.readouterr()
    assert prepared(options)
    assert measured == ["sage", "sinks", "sinks", "flags", "surprise"]
    said = capsys.readouterr().out
    assert re.findall(r"^\[(\d)/6\] (\w+), .*: already there$", said, re.M) == [("1", "vector"), ("2", "sage")]
    assert re.findall(r"^\[(\d)/6\] (\w+): done after \d+\.\d s$", said, re.M) == [
        ("3", "sinks"), ("4", "flags"), ("5", "alarm"), ("6", "surprise"),
    ]  # fmt: skip
    everything = states([part.measured for part in PARTS])
    assert said.splitlines()[-6:] == table(everything, options.model.path)
    after = calibration_of(options)
    assert after is not None
    assert after.parts == MEASURED
    assert after.divergence == known.divergence  # what was kept is not lost to what came later
    fingerprint = after.fingerprint
    store = steering.VectorStore(*options.model.vectors(), fingerprint=fingerprint)
    assert store.get("modality-preference").fingerprint == fingerprint
    capsys.readouterr()
    assert prepared(options)
    assert capsys.readouterr().out.count("already there") == 6


def test_a_part_that_cannot_be_measured_is_named_and_the_others_are(
    options: PrepareOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not prepared(replace(options, questions=30, only=("sinks", "alarm")))
    said = capsys.readouterr().out
    assert "[2/2] alarm: failed after" in said
    first, second, advice, reason = said.splitlines()[-4:]
    assert first.split()[:3] == ["ok", "prepared", "sinks:"]
    assert second.split()[:3] == ["warning", "prepared", "alarm:"]
    assert "helmsight eval alarm --keep" in advice
    assert re.match(r"alarm could not be measured: \d+ of 30 answers are wrong", reason)
    known = calibration_of(options)
    assert known is not None
    assert known.parts == ("sinks",)


def test_the_command_line_ends_with_the_table_of_doctor(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    common = ("--device", "cpu", "--threads", "1")
    words = ("--only", "sage", "sinks", "surprise", "--samples", "4", "--quiet", "--report", "reports")
    assert cli.main(["prepare", str(bare), *common, *words]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    cli.main(["doctor", "--model", str(bare), *common, "--no-compiled", "--port", "0", "--max-length", "64"])
    page = capsys.readouterr().out.splitlines()
    assert [line for line in page if line.split()[:2] == ["ok", "prepared"]] == lines
    missing = [line.split()[2] for line in page if line.split()[:2] == ["warning", "prepared"]]
    assert missing == ["vector:", "flags:", "alarm:"]
    assert cli.main(["prepare", str(bare), "--only", "everything"]) == 1
    assert "--only: unknown 'everything'" in capsys.readouterr().err
