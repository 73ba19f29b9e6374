"""`helmsight eval mc2` from the command line to its files, on a tiny random model."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
import torch

import steering
from probes.answering.base import Question, Reply
from probes.conflicts.options import PROBE_SEEDS
from probes.conflicts.samples import SIDES, messages
from probes.mc2 import ablate, automatic, evaluate
from probes.mc2 import command as mc2
from probes.vector.build import build
from server import cli
from tests.forked import forked
from tests.probes.command_line import demo_samples, last_error, run, strict, write_mc2
from tests.probes.conftest import make_samples, seen, text_of
from tests.probes.mc2.test_evaluate import said, simple_vector
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("loaded_once", "short_answers")

SIDED = {f"{kind}_{side}" for kind in ("instruct", "chain", "shots") for side in SIDES}
FIELDS = {"s_vision", "s_text", "s_others", "vision_ratio", "n"}


@pytest.fixture(scope="module")
def vector(tiny: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a vector of the tiny model to a file."""
    built = build(tiny, make_samples(3), name="made", layers=[1], quiet=True)
    return str(built.save(tmp_path_factory.mktemp("vector") / "made.safetensors"))


@pytest.fixture
def evaluation(model: str, vector: str, tmp_path: Path) -> list[str]:
    """Return the words of a small evaluation with its files in the test's folder."""
    where = ["--vector", vector, "--out", str(tmp_path / "mc2")]
    return ["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", "--limit", "2", *where]


def test_all_five_conditions(
    evaluation: list[str], tmp_path: Path, vector: str, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    assert (
        run(*evaluation, "--random-directions", "2", "--strength", "0.5", "--json", str(tmp_path / "shares.json")) == 0
    )
    report = strict(tmp_path / "mc2" / "report.json")
    assert set(report) == {"about", "conditions", "words", "attention", *(["sizes"] if "sizes" in report else [])}
    assert report["about"].items() >= {"samples": 2, "seed": 0, "vector": "made", "strength": 0.5}.items()
    assert report["about"]["data"] == "2 conflicts over held-out scenes of the demo world, drawn with seed 0"
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
    rows = [json.loads(line) for line in (tmp_path / "mc2" / "samples.jsonl").read_text().splitlines()]
    assert sorted(row["question"] for row in rows) == sorted(text_of(question) for question in questions)
    assert {row["push"]["vector"] for row in rows if row["push"]} == {"made", "random-0", "random-1"}
    assert {row["report_key"] for row in rows} == {"plain", "vision", "text", *SIDED, None}  # none: random directions
    given_vector = steering.SteeringVector.load(vector)
    pushed = [question.push.vector for question in questions if question.push and question.push.vector.name == "made"]
    assert all(torch.equal(push.direction, given_vector.direction) for push in pushed)
    assert {question.push.strength for question in questions if question.push} == {0.5}


@pytest.mark.usefixtures("undrawn")
def test_the_solved_examples_are_other_samples(evaluation: list[str], questions: list[Question]) -> None:
    assert run(*evaluation, "--conditions", "plain", "shots") == 0
    questions_asked = {id(question): question.chat[-1]["content"][-1]["text"].split("\n")[0] for question in questions}
    examples = {turn["content"][1]["text"].split("\n")[0] for question in questions for turn in question.chat[:-1:2]}
    assert len(examples) == 4
    assert examples.isdisjoint(questions_asked.values())


@pytest.mark.usefixtures("undrawn")
def test_an_evaluation_of_a_file(
    evaluation: list[str], tmp_path: Path, questions: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    file = write_mc2(tmp_path, 9)
    words = ("--conditions", "plain", "--tasks", "sport", "color", "--limit", "20")
    assert run(*evaluation, *file, *words) == 0
    report = strict(tmp_path / "mc2" / "report.json")
    assert report["about"]["data"] == "6 conflicts of the tasks color, sport from mc2.json, in the order of seed 0"
    assert set(report["conditions"]["plain"]["by_task"]) == {"sport", "color"}
    assert report["conditions"]["plain"]["n"] == report["about"]["samples"] == 6
    assert "There are only 6 samples; 20 were requested." in caplog.text
    assert len(questions) == 6 * 3 * 2


@pytest.mark.usefixtures("undrawn")
def test_a_repeated_evaluation_asks_only_what_is_new(
    evaluation: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    evaluation += ["--limit", "1"]
    assert run(*evaluation, "--conditions", "plain", "steer") == 0
    assert len(questions) == 2 * (1 + 2 + 3 * 2)
    first = (tmp_path / "mc2" / "report.json").read_bytes()
    questions.clear()
    assert run(*evaluation, "--conditions", "plain", "steer") == 0
    assert questions == []
    assert (tmp_path / "mc2" / "report.json").read_bytes() == first
    assert run(*evaluation, "--conditions", "plain", "instruct", "steer") == 0
    assert len(questions) == 2 * 2
    assert all("In case there is an inconsistency" in question.chat[0]["content"][1]["text"] for question in questions)


def test_ablations_and_the_automatic_direction(
    evaluation: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, questions: list[Question]
) -> None:
    for name in ("PROBED", "LEAST_PROBED"):
        monkeypatch.setattr(f"probes.mc2.run.{name}", 4)
    monkeypatch.setattr(ablate, "by_samples", partial(ablate.by_samples, sizes=(2, 4, 6)))
    words = ("--ablate", "samples", "tasks", "strength", "latency", "--auto", "drop", "--severity", "0.5", "0.75")
    assert run(*evaluation, "--limit", "1", "--conditions", "plain", "steer", *words) == 0
    report = strict(tmp_path / "mc2" / "report.json")
    assert set(report) >= {"about", "conditions", "samples", "tasks", "strength", "latency", "auto"}
    assert set(report["samples"]) == {"2", "4"}
    assert set(report["tasks"]) == {"color", "shape", "all tasks"}
    # Published is 1.
    assert {question.push.strength for question in questions if question.push} == set(ablate.STRENGTHS)
    rows = report["strength"]["rows"]
    assert {"0", "0.125", "1", "3"} <= set(rows)
    assert all(set(row) == {"vision", "text"} and row["text"]["n"] == 1 for row in rows.values())
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
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a home folder for the test and return its folder of calibrations."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".helmsight" / "vectors" / "calibrations"


@pytest.mark.usefixtures("undrawn")
def test_surprise_is_calibrated_and_then_evaluated(
    model: str, vector: str, kept_in: Path, capsys: pytest.CaptureFixture[str], questions: list[Question]
) -> None:
    out = kept_in.parents[2] / "mc2"
    common = ("--model", model, "--device", "cpu", "--quiet")
    words = ("--conditions", "plain", "steer", "--auto", "surprise", "--severity", "1")
    evaluated = ("eval", "mc2", *common, "--vector", vector, "--limit", "1", "--out", str(out), *words)
    assert run(*evaluated) == 1
    assert "'helmsight probe --calibrate-surprise'" in last_error(capsys)
    assert questions == []
    assert run("probe", *common, "--samples", "3", "--calibrate-surprise") == 0
    (file,) = kept_in.iterdir()
    calibration = strict(file)
    assert f"98% of 6 contexts surprise by at most {calibration['surprise']:.2f} nats" in capsys.readouterr().out
    engine = steering.Engine(steering.load(model, device="cpu", calibrations=kept_in), slots=4)
    samples = demo_samples(3, PROBE_SEEDS)
    chats = [messages(sample, "plain", swapped) for sample in samples for swapped in (False, True)]
    values = [value for value, _ in steering.surprises(engine, chats)]
    measured = [value for value in values if value is not None]
    assert calibration["surprise"] == pytest.approx(float(np.quantile(measured, 0.98)), rel=1e-3)
    assert run(*evaluated) == 0
    report = strict(out / "report.json")["auto"]
    assert report["bounds"] == dict.fromkeys(("surprise", "surprise, one degraded"), calibration["surprise"])
    assert {row["decided"] for row in report["rows"] if row["criterion"] == "surprise, one degraded"} == {1}


def test_the_command_offers_the_conditions_that_there_are() -> None:
    assert tuple(mc2.ConditionName) == (*evaluate.KINDS, *evaluate.MORE_KINDS)
    assert tuple(mc2.CriterionName) == steering.CRITERIA
    assert tuple(mc2.SEVERITIES) == automatic.SEVERITIES


@pytest.mark.usefixtures("undrawn")
def test_samples_of_the_vector_are_not_asked(model: str, tmp_path: Path, questions: list[Question]) -> None:
    data = ("--model", model, "--device", "cpu", "--quiet", *write_mc2(tmp_path, 9))
    vector = tmp_path / "v.safetensors"
    words = (
        "--samples",
        "3",
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
    assert len(set(made_from)) == 5
    questions.clear()
    more = ("--conditions", "plain", "steer", "--limit", "9", "--vector", str(vector), "--out", str(tmp_path / "mc2"))
    assert run("eval", "mc2", *data, *more) == 0
    assert strict(tmp_path / "mc2" / "report.json")["about"]["samples"] == 4
    texts = " ".join(str(part) for question in questions for part in question.chat[0]["content"])
    used = {int(name.rsplit("-", 1)[1]) for name in made_from}
    assert {number for number in range(9) if f"Ball {number} is blue." in texts} == set(range(9)) - used


@pytest.mark.usefixtures("undrawn")
def test_a_killed_evaluation_resumes(model: str, vector: str, tmp_path: Path, questions: list[Question]) -> None:
    words = ["eval", "mc2", "--model", model, "--device", "cpu", "--quiet", "--threads", "1", "--vector", vector]
    words += ["--limit", "3", "--seed", "2", "--conditions", "plain", "steer", "--slots", "4"]
    killed, complete = tmp_path / "killed", tmp_path / "whole"
    answers = killed / "answers.jsonl"
    with forked(lambda: cli.main([*words, "--out", str(killed)]), tmp_path / "said") as process:
        wait_for(lambda: answers.exists() and answers.read_bytes().count(b"\n") >= 12, 60, process)
        process.kill()
        process.join()
    total = 3 * 2 * (1 + 2 + 3 * 2)
    first_answers = answers.read_bytes()
    early = first_answers[: first_answers.rindex(b"\n") + 1]
    assert 12 <= early.count(b"\n") < total
    assert not (killed / "report.json").exists()

    assert cli.main([*words, "--out", str(killed)]) == 0
    assert len(questions) == total - early.count(b"\n")
    assert answers.read_bytes().startswith(early)
    keys = [json.loads(line)["key"] for line in answers.read_bytes().splitlines()]
    assert len(set(keys)) == len(keys) == total

    assert cli.main([*words, "--out", str(complete)]) == 0
    resumed, uninterrupted = strict(killed / "report.json"), strict(complete / "report.json")
    page = (killed / "report.md").read_text()
    for about in (resumed["about"], uninterrupted["about"]):
        about["command"] = about["command"].replace(str(killed), str(complete))
    assert resumed == near(uninterrupted)
    assert page.replace(str(killed), str(complete)) == (complete / "report.md").read_text()


def near(report: Any) -> Any:
    """Make a report's numbers approximate: the last bits depend on the rest of the batch."""
    if isinstance(report, dict):
        return {name: near(value) for name, value in report.items()}
    if isinstance(report, list):
        return [near(value) for value in report]
    return pytest.approx(report, abs=1e-6) if isinstance(report, float) else report


@pytest.mark.usefixtures("undrawn")
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
    assert last_error(capsys).endswith("mc2/conditions.svg: No space left on device")
    assert report.read_text() == "the old report"
    assert {path.name for path in report.parent.iterdir()} == {"report.json", "answers.jsonl", "samples.jsonl"}
    questions.clear()
    assert run(*words) == 0
    assert questions == []
    assert strict(report)["about"]["samples"] == 2


class Server:
    """Stands in for `probes.answering.endpoint.Endpoint`: it answers toward its push, plainly toward the image."""

    made: ClassVar[list[tuple[str, str | None]]] = []
    identity = "a server"

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        self.made.append((base_url, model))
        self.model = model or "served"

    def vector(self, name: str) -> steering.SteeringVector:
        return simple_vector(name)

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            push, text = question.push, question.chat[-1]["content"][-1]["text"]
            assert push is None or push.vector.name == "served"
            side = "text" if push is not None and push.toward == "text" else "vision"
            yield Reply(said(side[0], "A. blue" in text), seen(0.25), {"toward": side})


@pytest.mark.usefixtures("no_model", "undrawn")
def test_a_server_is_asked_in_place_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.answering.endpoint.Endpoint", Server)
    monkeypatch.setattr(Server, "made", [])
    words = ["eval", "mc2", "--base-url", "http://there/v1", "--quiet", "--limit", "2", "--vector", "served"]
    words += ["--conditions", "plain", "steer", "--out", str(tmp_path), "--ablate", "strength", "--auto"]
    assert run(*words) == 0
    report = strict(tmp_path / "report.json")
    assert report["about"]["model"] == "served at http://there/v1"
    assert report["about"]["vector"] == "served"
    assert {name: condition["vision_ratio"] for name, condition in report["conditions"].items()} == {
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
            "need the condition 'steer'",
        ),
        (("eval", "mc2", "--conditions", "plain", "--auto"), "need the condition 'steer'"),
        (("eval", "mc2", "--conditions", "plain", "--random-directions", "2"), "need the condition 'steer'"),
        (("eval", "mc2", "--severity", "1.5"), "--severity must be from 0 to 1, not 1.5"),
        (("eval", "mc2", "--severity", "0.5", "nan"), "--severity must be from 0 to 1, not nan"),
        (
            ("eval", "mc2", "--conditions", "plain", "--tasks", "sport"),
            "--tasks: unknown sport; there are color, shape",
        ),
        (
            ("eval", "mc2", "--conditions", "plain", "--mc2", "nothing.json", "--images", "."),
            "nothing.json: No such file or directory",
        ),
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


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("ablations", [("samples",), ("strength", "tasks"), ("latency",)])
def test_options_that_need_a_local_model_are_refused_with_a_server(
    evaluation: list[str], ablations: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nothing listens at that address: it must not even be asked.
    assert run(*evaluation, "--base-url", "http://127.0.0.1:9", "--ablate", *ablations) == 1
    ablation = next(ablation for ablation in ablations if ablation != "strength")
    assert last_error(capsys) == f"helmsight: --ablate {ablation} needs the model in this process, not --base-url"
    assert not (tmp_path / "mc2").exists()


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_file_that_is_too_small_for_four_shot_is_one_line(
    evaluation: list[str], tmp_path: Path, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*evaluation, *write_mc2(tmp_path, count)) == 1
    assert last_error(capsys) == f"helmsight: {count} samples are too few."


@pytest.mark.usefixtures("undrawn")
def test_a_small_file_keeps_four_examples_back(
    evaluation: list[str], tmp_path: Path, questions: list[Question]
) -> None:
    assert run(*evaluation, *write_mc2(tmp_path, 6), "--limit", "5", "--conditions", "plain", "shots") == 0
    assert strict(tmp_path / "mc2" / "report.json")["about"]["samples"] == 2
    assert {len(question.chat) for question in questions} == {1, 9}


@pytest.mark.parametrize(
    "words", [("probe", "--samples", "0"), ("eval", "mc2", "--limit", "-1"), ("probe", "--slots", "x")]
)
def test_counts_must_be_positive(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words, "--model", "nothing") == 2
    assert f"Invalid value for '{words[-2]}'" in capsys.readouterr().err
