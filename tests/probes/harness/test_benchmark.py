"""A benchmark of one file and one line in `BENCHMARKS` has all that the harness gives."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes import command
from probes.answering.base import Question, Reply
from probes.answering.engine import InProcess
from probes.harness.benchmark import Findings
from probes.harness.comparison import BASELINE
from probes.harness.session import Session
from steering import Icd, See
from tests.probes.command_line import last_error, run, strict
from tests.probes.conftest import text_of
from tests.probes.harness import toy

COLOURS = ("red", "green", "blue", "white")


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "BENCHMARKS", [*command.BENCHMARKS, toy.BENCHMARK])


@pytest.fixture
def words(loaded_once: None, model: str, tmp_path: Path) -> list[str]:
    return ["eval", "toy", "--model", model, "--device", "cpu", "--quiet", "--out", str(tmp_path / "toy")]


def test_a_run_writes_and_prints_its_results(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    files = ["--json", str(tmp_path / "scores.json"), "--markdown", str(tmp_path / "toy.md")]
    assert run(*words, *files, "--limit", "2") == 0
    assert [(text_of(question), question.interventions) for question in questions] == [
        (f"Is it {colour}?", way) for way in ((), (See(alpha=0.5),), (Icd(),)) for colour in ("red", "green")
    ]
    report = strict(tmp_path / "toy" / "report.json")
    assert (report["about"]["samples"], report["about"]["benchmark"]) == (2, "toy")
    assert report["about"]["command"] == shlex.join(["helmsight", *words, *files, "--limit", "2"])
    assert list(report["conditions"]) == [BASELINE, "See", "ICD"]
    plain, see = (report["conditions"][name]["colours"] for name in (BASELINE, "See"))
    assert [see[setting]["samples"] for setting in ("all", "red", "green")] == [2, 1, 1]
    difference = see["all"]["letters"]["value"] - plain["all"]["letters"]["value"]
    assert see["all"]["letters"]["difference"] == pytest.approx(difference)
    rows = [json.loads(line) for line in (tmp_path / "toy" / "samples.jsonl").read_text().splitlines()]
    assert [(row["condition"], row["sample"], row["setting"], row["questions"]) for row in rows] == [
        (name, number, colour, [f"Is it {colour}?"])
        for name in report["conditions"] for number, colour in enumerate(("red", "green"))
    ]  # fmt: skip
    letters = [len(row["answers"][0]) for row in rows if row["condition"] == "See"]
    assert sum(letters) / 2 == pytest.approx(see["all"]["letters"]["value"])
    assert [row["tally"]["letters"] for row in rows if row["condition"] == "See"] == letters
    assert json.loads((tmp_path / "scores.json").read_text()) == report["conditions"]
    page = (tmp_path / "toy.md").read_text()
    assert page == (tmp_path / "toy" / "report.md").read_text()
    printed = capsys.readouterr().out
    assert page in printed
    assert f"report: {tmp_path / 'toy' / 'report.html'}" in printed
    assert "<table>" in (tmp_path / "toy" / "report.html").read_text()


def test_a_report_names_what_was_left_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(options: toy.ToyOptions, session: Session) -> Findings:
        for _ in range(2):
            session.lack("SAGE without calibration: thresholds are rough.")
        return toy.BENCHMARK.run(options, session)

    benchmark = replace(toy.BENCHMARK, name="rough", run=without)
    monkeypatch.setattr(command, "BENCHMARKS", [*command.BENCHMARKS, benchmark])
    assert run("eval", "rough", *words[2:], "--limit", "2") == 0
    assert strict(tmp_path / "toy" / "report.json")["about"]["lacks"] == [
        "SAGE without calibration: thresholds are rough."
    ]
    page = (tmp_path / "toy" / "report.md").read_text()
    assert page.count("SAGE without calibration: thresholds are rough.") == 1
    assert "## What was left out" in page
    assert "thresholds are rough." in capsys.readouterr().out


def test_a_stopped_run_resumes(
    words: list[str], tmp_path: Path, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = InProcess.answers

    def interrupted(self: InProcess, questions: Iterable[Question]) -> Iterator[Reply]:
        for reply in answers(self, questions):
            yield reply
            if (tmp_path / "toy" / "answers.jsonl").read_text().count("\n") == 3:
                raise KeyboardInterrupt

    words += ["--limit", "4", "--colours", *COLOURS]
    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "answers", interrupted)
        assert run(*words) == 130
    assert not (tmp_path / "toy" / "report.json").exists()
    questions.clear()
    assert run(*words) == 0
    assert len(questions) == 3 * 4 - 3
    resumed = (tmp_path / "toy" / "report.json").read_bytes()
    questions.clear()
    assert run(*words) == 0
    assert questions == []
    assert resumed == (tmp_path / "toy" / "report.json").read_bytes()
    (tmp_path / "toy").rename(tmp_path / "stopped")
    assert run(*words) == 0
    assert len(questions) == 3 * 4
    assert resumed == (tmp_path / "toy" / "report.json").read_bytes()


class Server:
    """Stands in for `Endpoint`: it names the colour where nothing is done inside the model."""

    identity = "a server"
    model = "see"

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        assert (base_url, model) == ("http://there/v1", None)

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            yield Reply("No." if question.interventions else text_of(question))


@pytest.mark.usefixtures("no_model")
def test_a_server_is_asked_in_place_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.answering.endpoint.Endpoint", Server)
    assert run("eval", "toy", "--base-url", "http://there/v1", "--quiet", "--out", str(tmp_path)) == 0
    report = strict(tmp_path / "report.json")
    assert report["about"]["model"] == "see at http://there/v1"
    scores: dict[str, Any] = {
        name: condition["colours"]["all"]["named"] for name, condition in report["conditions"].items()
    }
    assert {name: score["value"] for name, score in scores.items()} == {BASELINE: 1, "See": 0, "ICD": 0}
    assert (scores["See"]["difference"], scores["See"]["turned"]) == (-1, 1)


@pytest.mark.usefixtures("no_model")
def test_the_report_of_another_benchmark_is_not_lost(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "toy" / "report.json"
    file.parent.mkdir()
    file.write_text('{"about": {"benchmark": "pope"}}')
    assert run(*words) == 1
    assert "holds the report of 'eval pope'; choose another folder" in capsys.readouterr().err
    assert json.loads(file.read_text()) == {"about": {"benchmark": "pope"}}


@pytest.mark.usefixtures("no_model")
def test_a_missing_package_is_reported_before_any_work(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("probes.harness.bootstrap.find_spec", lambda name: None)
    for more in ((), ("--base-url", "http://127.0.0.1:9")):  # where nothing listens, and nothing must be asked
        assert run(*words, *more) == 1
        assert last_error(capsys).endswith("Intervals of shares need statsmodels: pip install statsmodels")


@pytest.mark.usefixtures("no_model")
def test_invalid_options_are_reported_before_any_work(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    # Nothing listens at that address: it must not even be asked.
    assert run(*words, "--base-url", "http://127.0.0.1:9", "--colours", "beige") == 1
    assert last_error(capsys) == "helmsight: --colours: nobody knows what is beige"


@pytest.mark.usefixtures("no_model")
def test_a_server_that_is_not_there_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words, "--base-url", "http://127.0.0.1:9") == 1
    assert capsys.readouterr().err == (
        "helmsight: http://127.0.0.1:9/v1/models did not answer: Connection refused; is the server running?\n"
    )


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("option", ["--out", "--json", "--markdown"])
def test_an_unwritable_folder_is_reported_before_any_work(
    words: list[str], option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert run(*words, option, str(file / "new" / "report")) == 1
    folder = file / "new" / "report" if option == "--out" else file / "new"
    assert last_error(capsys) == f"helmsight: {folder} cannot be written to: {file} is no folder"


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "toy", "--help") == 0
    printed = capsys.readouterr().out
    assert "pictures [default: 4]" in printed
    assert "asked about in turn" in printed
    for option in ("--limit", "--base-url", "--out", "--json", "--markdown", "--colours", "--seed", "--slots"):
        assert option in printed
