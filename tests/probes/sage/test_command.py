"""`helmsight eval sage` from the command line to its files, on a tiny random model and a scripted server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.harness.comparison import BASELINE
from probes.sage.samples import QUESTIONS
from server import cli
from steering import Icd, See
from tests.probes.command_line import last_error, run, strict
from tests.probes.conftest import text_of

pytestmark = pytest.mark.usefixtures("loaded_once", "short_answers", "undrawn")


@pytest.fixture
def words(model: str, tmp_path: Path) -> list[str]:
    """Return the words of a small run with its files in the test's folder."""
    small = ["--device", "cpu", "--quiet", "--limit", "2", "--pairs", "1", "--out", str(tmp_path / "out")]
    return ["eval", "sage", "--model", model, *small]


def test_the_command_writes_all_files_for_the_conditions_asked_for(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--json", str(tmp_path / "sage.json"), "--markdown", str(tmp_path / "sage.md")]
    assert cli.main([*words, *files, "--conditions", "+ S*"]) == 0
    conditions = json.loads((tmp_path / "sage.json").read_text())
    assert list(conditions) == [BASELINE, "+ See"]
    assert [conditions[BASELINE][part]["all"]["samples"] for part in ("existence", "differences")] == [2, 1]
    assert (tmp_path / "sage.md").read_text().startswith("# SAGE on")
    report = strict(tmp_path / "out" / "report.json")
    assert report["conditions"] == conditions
    assert report["about"].items() >= {"questions": 2, "pairs": 1, "seed": 0}.items()
    assert cli.main([*words, "--conditions", "Sea"]) == 1
    assert "--conditions: unknown 'Sea'; there are 'baseline', '+ See'" in capsys.readouterr().err


def test_a_repeated_run_asks_only_what_is_new(
    words: list[str], tmp_path: Path, questions: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    asked_each = 2 + len(QUESTIONS)
    assert cli.main([*words, "--conditions", "+ See"]) == 0
    assert len(questions) == 2 * asked_each
    first = (tmp_path / "out" / "report.json").read_bytes()
    questions.clear()
    assert cli.main([*words, "--conditions", "+ See"]) == 0
    assert questions == []
    assert (tmp_path / "out" / "report.json").read_bytes() == first
    assert cli.main([*words, "--conditions", "+ See", "ICD"]) == 0
    assert [question.interventions for question in questions] == [(Icd(),)] * asked_each
    assert cli.main([*words, "--conditions", "SAGE"]) == 0  # its name in other benchmarks
    assert "+ Generate is left out: qwen2_vl was not calibrated" in caplog.text


def test_a_condition_of_ones_own(
    words: list[str], questions: list[Question], capsys: pytest.CaptureFixture[str]
) -> None:
    strong = '{"sage": {"see": {"alpha": 0.5}, "think": false, "generate": false}}'
    assert cli.main([*words, "--conditions", "baseline", "--condition", f"strong={strong}"]) == 0
    assert {question.interventions for question in questions} == {(), (See(alpha=0.5),)}
    for wrong, message in (
        ("strong", "--condition strong: NAME=JSON is needed, such as"),
        ("strong=[]", "--condition strong: NAME=JSON is needed, such as"),
        ('strong={"sgae": true}', "--condition strong: 'sgae' is unknown; allowed: "),
        ('strong={"sage": {"see": {"alpha": 5}}}', "--condition strong: 'sage.see.alpha' must be from 0 to 1; got 5."),
    ):
        assert cli.main([*words, "--condition", wrong]) == 1
        assert message in capsys.readouterr().err


class Server:
    """Stands in for `Endpoint`: it says yes, and no where it is asked to see."""

    helmsight: ClassVar[bool] = True
    identity = "a server"
    model = "m"

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        self.base_url = base_url

    def check_interventions(self) -> None:
        if not self.helmsight:
            raise ValueError("that is not a Helmsight server.")

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            yield Reply("No." if See() in question.interventions else "Yes.")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the words of a run that asks a server."""
    monkeypatch.setattr("probes.answering.endpoint.Endpoint", Server)
    monkeypatch.setattr(Server, "helmsight", True)
    return ["eval", "sage", "--base-url", "http://there/v1", "--quiet", "--limit", "6", "--out", str(tmp_path)]


@pytest.mark.usefixtures("no_model")
def test_a_server_is_asked_in_place_of_a_model(served: list[str], tmp_path: Path) -> None:
    assert cli.main([*served, "--conditions", "+ See", "VCD"]) == 0
    conditions = strict(tmp_path / "report.json")["conditions"]
    yes = {name: condition["existence"]["all"]["yes"]["value"] for name, condition in conditions.items()}
    assert yes == {BASELINE: 1, "+ See": 0, "VCD": 1}
    page = (tmp_path / "report.md").read_text()
    assert page.startswith(
        "# SAGE on m at http://there/v1\n\n- Data: 6 existence questions and 6 pairs of images over held-out scenes of "
        "the demo world, drawn with seed 0\n- Model: m at http://there/v1\n"
    )
    assert "torch" not in page  # which the server may have in another version


@pytest.mark.usefixtures("no_model")
def test_another_server_answers_the_baseline_alone(
    served: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "helmsight", False)
    assert cli.main(served) == 1
    assert last_error(capsys) == "helmsight: that is not a Helmsight server."
    assert not (tmp_path / "answers.jsonl").exists()
    assert cli.main([*served, "--conditions", "baseline"]) == 0
    assert list(strict(tmp_path / "report.json")["conditions"]) == [BASELINE]


def test_popes_questions_are_asked_in_place_of_the_demo_worlds(
    words: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    rows = [{"image": f"{i}.jpg", "text": f"Is there a dog number {i}?", "label": "yes"} for i in range(6)]
    for row in rows:
        Image.new("RGB", (56, 56), "red").save(tmp_path / row["image"])
    file = tmp_path / "coco_pope_random.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    pope = ["--pope", str(file), "--images", str(tmp_path), "--conditions", "baseline"]
    assert run(*words, *pope) == 0  # which has no demo world
    about = strict(tmp_path / "out" / "report.json")["about"]
    assert about["data"] == "2 existence questions from coco_pope_random.json, in the order of seed 0"
    texts = {text_of(question) for question in questions}
    assert len(texts) == 2
    assert texts <= {row["text"] for row in rows}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--pope", "x.json"), "--pope needs --images, the folder of COCO val2014"),
        ((), "--pope is needed: the demo world, which draws questions, is not installed"),
    ],
)
def test_without_samples_the_command_is_refused(
    words: list[str], more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words, *more) == 1
    assert last_error(capsys) == f"helmsight: {message}"
