"""The lists of questions from the command line to their files, on a tiny random model and on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from probes.answering.base import Question
from probes.command import LISTS, READINGS
from probes.harness.benchmark import Benchmark
from probes.harness.comparison import BASELINE
from server import cli
from steering import Icd
from tests.probes.command_line import last_error, run, strict
from tests.probes.conftest import text_of


@pytest.fixture
def words(loaded_once: None, model: str, tmp_path: Path) -> list[str]:
    """Return the words of a small run with its files in the test's folder; the benchmark's name comes second."""
    return ["eval", "--model", model, "--device", "cpu", "--quiet", "--limit", "4", "--out", str(tmp_path / "out")]


@pytest.mark.parametrize("entry", [*LISTS, READINGS], ids=lambda entry: entry.name)
def test_each_list_is_asked_by_its_own_task(entry: Benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.image_qa.run.run", lambda options, task, session: task.title)
    assert entry.name in str(entry.run(None, None)).casefold()


@pytest.mark.usefixtures("undrawn")
def test_the_demo_world_is_asked_under_the_conditions_and_the_run_goes_on(
    words: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    words.insert(1, "pope")
    words += ["--conditions", "ICD", "--noise", "30"]
    assert cli.main(words) == 0
    assert [question.interventions for question in questions] == [(), (), (), (), *[(Icd(),)] * 4]
    report = strict(tmp_path / "out" / "report.json")
    assert list(report["conditions"]) == [BASELINE, "ICD"]
    assert "over held-out scenes of the demo world with noise of standard deviation 30" in report["about"]["data"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert page.startswith("# POPE on ")
    assert "### By setting" in page
    questions.clear()
    assert cli.main(words) == 0
    assert questions == []


def test_files_are_asked_in_place_of_the_demo_world(
    words: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    rows = [{"image": f"{i}.jpg", "text": f"Is there a dog number {i}?", "label": "yes"} for i in range(6)]
    for row in rows:
        Image.new("RGB", (56, 56), "red").save(tmp_path / row["image"])
    (tmp_path / "0.jpg").write_bytes(b"no picture")
    file = tmp_path / "coco_pope_random.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    words.insert(1, "pope")
    assert (
        run(*words, "--data", str(file), "--limit", "6", "--conditions", "baseline") == 0
    )  # the images lie beside the file
    about = strict(tmp_path / "out" / "report.json")["about"]
    assert about["data"] == "5 questions from coco_pope_random.json, in the order of seed 0"
    assert {text_of(question) for question in questions} == {row["text"] for row in rows[1:]}
    assert about["left_out"] == 1
    assert "1, because their files are missing or do not decode" in (tmp_path / "out" / "report.md").read_text()
    rows_written = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert {(row["id"], row["expected"]) for row in rows_written} == {
        (f"{number}-{number}", "yes") for number in range(1, 6)
    }


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--images", "x"), "--images needs --data, the published files"),
        (
            ("--data", "x.json", "--noise", "3"),
            "--noise applies to the demo world's images, not to those of --data",
        ),
        (("--data", "x.json"), "--data: there is no x.json"),
        ((), "--data is needed: no demo world is installed that draws samples of pope"),
    ],
)
def test_without_samples_the_command_is_refused(
    words: list[str], more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words.insert(1, "pope")
    assert run(*words, *more) == 1
    assert last_error(capsys) == f"helmsight: {message}"
