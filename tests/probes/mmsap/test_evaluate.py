"""MM-SAP asked under several conditions, of a scripted answerer and from the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from demo.world.awareness import BASIC, BEYOND, KNOW, sap_samples
from demo.world.scenes import UNSEEN_COLOURS, UNSEEN_LETTERS, UNSEEN_SHAPES
from probes.answering.base import Question
from probes.harness.comparison import BASELINE
from probes.mmsap.evaluate import TOTAL, evaluate
from probes.mmsap.report import report
from server import cli
from steering import RefusalPrompt, Request
from steering.interventions.refusal import REFUSAL, REFUSAL_PROMPT
from tests.probes.command_line import last_error, strict
from tests.probes.conftest import Scripted, text_of
from tests.probes.mmsap.making import choosing, options_of, sample

CONDITIONS = {BASELINE: (), "refusal prompt": (RefusalPrompt(),)}
SAMPLES = [sample(part, number, f"kind {number % 2}") for part in ("basic", "know", "beyond") for number in range(4)]  # type: ignore[arg-type]


def choice(label: str, question: Question) -> str | None:
    """Choose an answer by the part of the question.

    It knows all that can be seen; it refuses all of the questions of knowledge and knows the first; it makes up answers to
    unanswerable questions unless it is told that it may refuse.
    """
    is_told, forced = bool(question.interventions), REFUSAL not in options_of(question)
    match label.split():
        case "basic", _:
            return "red"
        case "know", number:
            return ("red" if number == "0" else "blue") if forced else None
    return None if is_told or label == "beyond 0" else "blue"


@pytest.fixture(scope="module")
def answerer() -> Scripted:
    return Scripted(choosing(choice), ahead=3)


@pytest.fixture(scope="module")
def found(answerer: Scripted) -> Any:
    return evaluate(answerer, CONDITIONS, SAMPLES, runs=3, seed=0, quiet=True)


def test_every_condition_is_scored_by_part_by_subtask_and_whole(found: Any) -> None:
    conditions, runs = found
    assert list(conditions) == list(runs) == list(CONDITIONS)
    plain, with_prompt = conditions[BASELINE], conditions["refusal prompt"]
    assert {name: plain[TOTAL][name]["samples"] for name in plain[TOTAL]} == {
        "all": 12,
        "basic": 4,
        "know": 4,
        "beyond": 4,
    }
    assert [plain[part]["all"]["sa"]["value"] for part in ("basic", "know", "beyond")] == [1, 3 / 4, 1 / 4]
    assert plain["beyond"]["kind 0"]["ku"]["value"] == 1 / 2
    assert plain["know"]["all"]["unknown_knowns"]["value"] == 1 / 4
    assert [plain[TOTAL]["all"][name]["value"] for name in ("kk", "ku", "sa")] == [
        4 / 12,
        4 / 12,
        pytest.approx(8 / 12),
    ]
    assert with_prompt[TOTAL]["all"]["ku"]["difference"] == pytest.approx(3 / 12)
    low, high = plain[TOTAL]["all"]["sa"]["value_95"]
    assert low < 8 / 12 < high
    assert runs[BASELINE][TOTAL]["ku"] == {"mean": 4 / 12, "deviation": 0, "runs": [4 / 12] * 3}
    assert runs[BASELINE]["know"]["refusals"]["runs"] == [4, 4, 4]
    assert runs["refusal prompt"]["basic"]["unknown_knowns"]["mean"] is None


def test_the_deviation_is_over_runs() -> None:
    letters = Scripted(lambda question: "A")  # right where the order of a run has it first
    _, runs = evaluate(letters, {BASELINE: ()}, [sample("basic", number) for number in range(20)], 4, 1, quiet=True)
    shares = [sum(sample("basic", i).offered(run, 1)[0][0] == "red" for i in range(20)) / 20 for run in range(4)]
    spread = runs[BASELINE]["basic"]["kk"]
    mean = sum(shares) / 4
    assert spread["runs"] == pytest.approx(shares)
    assert len({*shares}) > 1
    assert spread["deviation"] == pytest.approx((sum((share - mean) ** 2 for share in shares) / 3) ** 0.5)


def test_each_sample_has_its_questions(answerer: Scripted, found: Any) -> None:
    plain = [question for question in answerer.asked if not question.interventions]
    assert len(plain) == 3 * (4 + 2 * 4 + 4)
    first = text_of(plain[0])
    assert re.fullmatch(
        r"basic 0: what color is it\?\n(?:[A-D]\. .*\n){4}Answer with the option's letter from the given choices directly\.",
        first,
    )
    orders = {tuple(options_of(question)) for question in plain if text_of(question).startswith("basic 0")}
    assert len(orders) > 1
    assert all({*order} == {"red", "blue", "teal", REFUSAL} for order in orders)
    know = [tuple(options_of(question)) for question in plain if text_of(question).startswith("know 0")]
    assert know[1] == tuple(option for option in know[0] if option != REFUSAL)
    (message,) = Request(plain[0].chat, interventions=[RefusalPrompt()]).chat
    assert message["content"][-1]["text"].endswith(f"\n{REFUSAL_PROMPT}")
    assert message["content"][-1]["text"].count("Answer with") == 1


def test_the_report_has_the_papers_tables(found: Any) -> None:
    page = report({"model": "m", "data": "d", "runs": 3, "versions": {}}, *found).markdown()
    row = " | ".join(f"{value:.3f}\u00a0±\u00a00.000" for value in (1, 0, 3 / 4, 1 / 4, 1 / 3, 1 / 3, 2 / 3))
    assert f"| baseline | {row} |" in page
    assert "| KnowVisQA | kind 0 | 2 | 0.500" in page
    assert "(scores.svg)" in page


def test_the_demo_world_draws_all_three_parts() -> None:
    samples = sap_samples(54, 3)
    parts = [sample.part for sample in samples]
    assert [parts.count(part) for part in ("basic", "know", "beyond")] == [18, 18, 18]
    assert {sample.subtask for sample in samples if sample.part == "basic"} == {*BASIC}
    assert {sample.subtask for sample in samples if sample.part == "beyond"} == {*BEYOND}
    never = {*UNSEEN_COLOURS, *UNSEEN_LETTERS, *UNSEEN_SHAPES}
    for drawn in samples:
        assert len({*drawn.options}) == 4
        assert (drawn.answer is None) is (drawn.part == "beyond")
        assert drawn.answer is None or drawn.answer in drawn.options
        if drawn.part == "know":
            assert (drawn.answer in never) is drawn.subtask.endswith("never seen")
    assert len({sample.subtask for sample in samples if sample.part == "know"}) == 2 * len(KNOW)
    again = sap_samples(54, 3)
    assert [(sample.question, sample.image.tobytes()) for sample in again] == [
        (sample.question, sample.image.tobytes()) for sample in samples
    ]  # type: ignore[union-attr]


@pytest.fixture
def words(loaded_once: None, model: str, tmp_path: Path) -> list[str]:
    small = ["--device", "cpu", "--quiet", "--limit", "3", "--runs", "2", "--out", str(tmp_path / "out")]
    return ["eval", "mm-sap", "--model", model, *small]


@pytest.mark.usefixtures("short_answers")
def test_the_command_writes_all_files_and_goes_on(words: list[str], tmp_path: Path, questions: list[Question]) -> None:
    assert cli.main([*words, "--conditions", "refusal prompt"]) == 0
    assert len(questions) == 2 * 2 * (1 + 2 * 1 + 1)
    report = strict(tmp_path / "out" / "report.json")
    assert list(report["conditions"]) == [BASELINE, "refusal prompt"]
    assert report["about"].items() >= {"questions": 3, "runs": 2, "seed": 0}.items()
    assert report["runs"][BASELINE][TOTAL]["sa"]["runs"][0] == pytest.approx(
        sum(report["runs"][BASELINE][TOTAL][name]["runs"][0] for name in ("kk", "ku"))
    )
    questions.clear()
    assert cli.main([*words, "--conditions", "refusal prompt"]) == 0
    assert questions == []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.usefixtures("short_answers")
def test_a_limit_takes_of_each_part_in_proportion(words: list[str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    sample("basic").image.save(data / "x.png")  # type: ignore[union-attr]
    row = {"image": "x.png", "question": "What?", "options": ["red", "blue"], "answer": "A"}
    for name, rows in (
        ("BasicVisQA", [row] * 20),
        ("KnowVisQA", [row] * 10),
        ("BeyondVisQA", [row | {"answer": None}] * 10),
    ):
        (data / f"{name}.json").write_text(json.dumps(rows))
    words[words.index("--runs") + 1], words[words.index("--limit") + 1] = "1", "8"
    assert cli.main([*words, "--data", str(data), "--conditions", "baseline"]) == 0
    assert (
        "8 questions (4 of BasicVisQA, 2 of KnowVisQA, 2 of BeyondVisQA), data, seed 0"
        in (strict(tmp_path / "out" / "report.json")["about"]["data"])
    )


def test_invalid_options_are_refused_before_a_model_is_loaded(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], no_model: None
) -> None:
    assert cli.main([*words, "--images", str(tmp_path)]) == 1
    assert last_error(capsys) == "helmsight: --images needs --data, the file or folder of the questions"
    assert cli.main([*words, "--conditions", "refuse"]) == 1
    assert "unknown 'refuse'; there are 'baseline', 'SAGE'" in last_error(capsys)
