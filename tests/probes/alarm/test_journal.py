"""The threshold from a journal's judged answers: chosen right, measured on others, and refused if it says nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import steering
from probes.alarm.journal import choose, nothing, of_rows
from server.cli import main
from server.journal.database import Place, open_database
from server.journal.reading.queries import Filters
from server.journal.reading.truths import judged_of
from steering.model.alarm import Alarm
from tests.server.journal.journals import put, row

pytestmark = pytest.mark.usefixtures("undrawn")

ALARM = Alarm({"mean_logprob": {"centre": -1.0, "scale": 0.5, "weight": -1.0}}, 0.0, 9.0, 100, {})
"""An alarm whose threshold no answer exceeds; wrong answers of `answers` have the lower log-probabilities."""


def answers(count: int, tells: float, seed: int = 0, **more: Any) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    wrong = rng.random(count) < 0.3
    values = rng.normal(-1.0 - tells * wrong, 0.5)
    return [
        {"model": "m", "intervention": "none", "right": not bad, "numbers": {"mean_logprob": float(value)}, **more}
        for bad, value in zip(wrong, values, strict=True)
    ]


def test_the_threshold_is_the_quantile_of_right_answers_of_one_half() -> None:
    judged = of_rows(answers(4000, tells=1.0), "m", ["mean_logprob"])
    alarm, found = choose(ALARM, judged)
    right = -(judged.values["mean_logprob"][~judged.wrong] + 1.0) / 0.5
    assert alarm.threshold == pytest.approx(np.quantile(right, 0.95), abs=0.15)
    assert (alarm.numbers, alarm.bias, alarm.answers) == (ALARM.numbers, 0.0, 2000)
    assert found["alarm"]["false_alarms"] == pytest.approx(0.05, abs=0.02)
    # A shift by two standard deviations: Phi(2 - 1.645) of the wrong ones exceed it, and the area is Phi(2 / sqrt 2).
    assert found["alarm"]["caught"] == pytest.approx(0.639, abs=0.05)
    assert found["auroc"]["auroc"] == pytest.approx(0.921, abs=0.02)
    assert alarm.raised["wrong"] == [found["alarm"]["caught"], *found["alarm"]["caught_95"]]
    assert nothing(found) is None


@pytest.mark.parametrize(
    ("count", "tells", "why"), [(400, 0.0, "0.5 is chance"), (80, 0.6, "of the wrong answers, and")]
)
def test_an_interval_that_says_nothing(count: int, tells: float, why: str) -> None:
    _, found = choose(ALARM, of_rows(answers(count, tells), "m", ["mean_logprob"]))
    assert why in str(nothing(found))


def test_rows_without_numbers_or_of_another_model_do_not_count() -> None:
    rows = [*answers(5, 1.0), *answers(3, 1.0, model="other"), *answers(2, 1.0, numbers={"mean_logprob": None})]
    assert len(of_rows(rows, "m", ["mean_logprob"]).wrong) == 5
    with pytest.raises(
        ValueError, match=r"no judged answer of x .*: 0 are judged \(of all models: 7 of m, 3 of other\)"
    ):
        of_rows(rows, "x", ["mean_logprob"])
    with pytest.raises(ValueError, match="answer_correct"):
        of_rows(rows[-2:], "m", ["mean_logprob"])


def journal(path: Path, count: int, tells: float) -> Path:
    """Write judged answers of the embedded model, and answers that must not count."""
    database = open_database(Place.of(str(path)))
    rng = np.random.default_rng(3)
    wrong = rng.random(count) < 0.4
    rows = [
        row(
            number, model="helmsight-demo", created=time.time(), answer_correct=not bad, sampling='{"n":1}',
            readouts=json.dumps({"least_logprob": float(min(0.0, rng.normal(-1.0 - tells * bad, 0.3)))}),
        )
        for number, bad in enumerate(wrong)
    ]  # fmt: skip
    others: list[dict[str, Any]] = [{"answer_correct": None}, {"answer_correct": True, "sampling": '{"n":2}'}]
    others += [{"answer_correct": True, "sampling": '{"n":1}', "source": source} for source in ("eval", "probe")]
    rows += [row(1000 + number, model="helmsight-demo", **other) for number, other in enumerate(others)]
    rows.append(row(2000, model="helmsight-demo", answer_correct=True, created=time.time() - 30 * 86_400))
    put(database, *rows)
    database.close()
    return path


def test_judged_answers_are_those_with_a_truth_and_one_choice(tmp_path: Path) -> None:
    path = str(journal(tmp_path / "journal.db", 20, 1.0))
    assert len(judged_of(path, Filters())) == 21
    found = judged_of(path, Filters(since=time.time() - 86_400))
    assert len(found) == 20
    assert found[0]["numbers"].keys() >= {"least_logprob", "focus_share", "attention_ratio"}
    assert [len(judged_of(path, Filters(source=source))) for source in ("live", "eval", "probe")] == [21, 1, 1]
    with pytest.raises(ValueError, match="no journal"):
        judged_of(str(tmp_path / "none.db"), Filters())


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--journal", "none.db"], "no journal"), (["--journal", "none.db", "--since", "soon"], "--since")],
)
def test_what_is_wrong_with_the_journal_is_told_before_the_model_is_loaded(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(steering, "load", None)
    assert main(["eval", "alarm", "--from-journal", "--quiet", *words]) == 1
    assert why in capsys.readouterr().err


def test_the_command_keeps_a_threshold_that_says_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    tells, silent = journal(tmp_path / "tells.db", 400, 2.0), journal(tmp_path / "silent.db", 100, 0.0)
    command = ["eval", "alarm", "--from-journal", "--since", "7d", "--quiet", "--keep", "--journal"]
    assert main([*command, str(silent)]) == 1
    assert "says nothing" in capsys.readouterr().err
    kept = tmp_path / ".helmsight" / "vectors" / "calibrations"
    assert not kept.exists()

    assert main([*command, str(tells)]) == 0
    assert "400 judged answers of the journal" in capsys.readouterr().out
    (file,) = kept.iterdir()
    alarm = json.loads(file.read_text())["alarm"]
    report = json.loads((tmp_path / "build" / "alarm" / "report.json").read_text())
    assert alarm == report["alarm"]
    assert alarm["threshold"] != report["before"]
    assert alarm["raised"]["wrong"][1] > alarm["raised"]["right"][2]
    assert main([*command, str(tells)]) == 1
    assert "--replace" in capsys.readouterr().err
    assert main(["eval", "alarm", "--from-journal", "--data", "x.jsonl"]) == 1
    assert main(["eval", "alarm", "--since", "7d"]) == 1
