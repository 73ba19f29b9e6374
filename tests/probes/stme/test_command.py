"""`helmsight eval stme` from the command line to its files: a scripted server and a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.world.targets import target_samples
from probes.answering.base import Question, Reply
from probes.stme.samples import ANCHOR, CAPTION, WHICH
from server import cli
from tests.probes.command_line import last_error, run, strict

LIMIT = 36


def pictures(question: Question) -> int:
    content = question.chat[-1]["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


class Looking:
    """A fake Helmsight server.

    It says "The second picture.", and looked at that in its last layer, at the first picture in the one before.
    """

    identity = "a server"
    model = "looking"
    focus = True

    def __init__(self, base_url: str, *, model: str | None = None) -> None:
        assert base_url == "http://there/v1"

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for question in questions:
            readouts: dict[str, Any] | None = None
            if question.diagnose is not None and self.focus:
                count = pictures(question)
                rows = [[0.4, *[0.1] * (count - 1)], [0.1, 0.2, *[0.1] * (count - 2)]]
                anchor = {"sigma": [[0.3, *[0.1] * (count - 2)]] * 2}
                readouts = {"focus": {"sigma": rows, "m_lnd": {"n": 1}}, "anchor": anchor}
                readouts["images"] = [{"grid": [3, 3]}] * count
                readouts["patches"] = [{"rho": [[0.1] * 9, [0.0] * 8 + [0.3]]}] * count
                maps = {" seen": [0.0] * 8 + [2.0], "It": [1.0] * 9, ".": [0.0] * 9}
                readouts["tam"] = [{"token": token, "image": image, "map": map_} for token, map_ in maps.items()
                               for image in range(1, count + 1)]  # fmt: skip
            text = "[1]" if question.diagnose is None and WHICH in str(question.chat) else "The second picture."
            yield Reply(text if pictures(question) else "I see none.", readouts)


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr("probes.answering.endpoint.Endpoint", Looking)
    monkeypatch.setattr(Looking, "focus", True)
    small = ["--limit", f"{LIMIT}", "--shuffles", "2", "--out", str(tmp_path / "out"), "--quiet"]
    return ["eval", "stme", "--base-url", "http://there/v1", *small]


@pytest.mark.usefixtures("no_model")
def test_a_run_is_scored_by_answers_and_looks(words: list[str], tmp_path: Path) -> None:
    assert cli.main(words) == 0
    report = strict(tmp_path / "out" / "report.json")
    every = report["conditions"]["baseline"]["samples"]["all"]
    attention = report["attention"]["baseline"]["all"]
    # Right are captions and anchors whose target is the second picture; captions look there, anchors at the first.
    second = [sample for sample in target_samples(LIMIT, 0) if sample.target == 2 and sample.task in (CAPTION, ANCHOR)]
    captions = sum(sample.task == CAPTION for sample in second)
    assert 0 < captions < len(second)
    assert every["answers"]["value"] == len(second) / LIMIT
    assert every["ivm"]["value"] == (len(second) - captions) / LIMIT
    four = attention["quadrants"]
    assert (four["right_target"], four["right_other"]) == (captions, len(second) - captions)
    assert four["wrong_target"] + four["wrong_other"] == LIMIT - len(second)
    # By the one largest factor of both layers, .4, all look at the first picture.
    assert report["attention"]["baseline"]["easy"]["right"]["curves"]["lnd"] == [1, 0]
    assert report["blind"]["all"]["share"]["value"] == 0
    assert report["hidden"]["all"]["focused"]["value"] == 0  # it says the same whatever is hidden
    # An even look in the first layer, and in the last one all of it at the lower right corner.
    corners = [
        sample.spot == (2 / 3, 2 / 3, 1, 1) for sample in second if sample.task == CAPTION and sample.spot is not None
    ]
    assert corners
    assert report["patches"]["on_spot"] == pytest.approx([1, 9 * sum(corners) / len(corners)])
    # Of the answer's three tokens one has a map of that corner alone, one an even map, and one an empty one.
    assert report["patches"]["said"]["value"] == pytest.approx((9 * sum(corners) / len(corners) + 1) / 2)
    last = report["convergence"]["all"]["last"]
    assert last["value"] == pytest.approx(report["convergence"]["all"]["right"][-1])
    assert last["value_95"][0] <= last["value"] <= last["value_95"][1]
    assert len(report["shuffles"]["all"]["answers"]["orders"]) == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    row = next(row for row in lines if row["part"] == "samples")
    assert row["sigma"][0][0][:2] == [0.4, 0.1]  # so that curves over N can be computed anew
    assert all("sigma" not in row for row in lines if row["part"] == "blind")
    anchor = report["anchor"]["every"]
    assert anchor["image"]["curves"]["lnd"][0] + anchor["text"]["curves"]["lnd"][0] <= 1  # the first, the second
    page = (tmp_path / "out" / "report.md").read_text()
    for heading in ("Four quadrants", "Other orders of the images", "One image hidden", "An anchor"):
        assert f"# {heading}" in page
    assert (tmp_path / "out" / "case-1.svg").is_file()


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "answers.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("no_model", "undrawn")
def test_a_repeated_run_asks_nothing_and_says_the_same(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looking, "focus", False)
    assert cli.main(words) == 0
    first, count = (tmp_path / "out" / "report.json").read_bytes(), len(answers(tmp_path))
    assert cli.main(words) == 0
    assert (tmp_path / "out" / "report.json").read_bytes() == first
    assert len(answers(tmp_path)) == count


@pytest.mark.usefixtures("no_model", "undrawn")
def test_without_diagnostics_answers_alone_are_scored(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Looking, "focus", False)
    assert cli.main([*words, "--shuffles", "0"]) == 0
    report = strict(tmp_path / "out" / "report.json")
    assert report["conditions"]["baseline"]["samples"]["all"]["answers"]["value"] > 0
    assert not {"attention", "hidden", "shuffles", "cases"} & report.keys()
    assert "has no diagnostics, so the attention is unknown" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_model_is_asked_under_a_condition_of_ones_own(model: str, tmp_path: Path) -> None:
    words = [
        "eval",
        "stme",
        "--model",
        model,
        "--device",
        "cpu",
        "--limit",
        "6",
        "--shuffles",
        "1",
        "--max-tokens",
        "2",
    ]
    see = 'See={"sage": {"see": true, "think": false, "generate": false}}'
    assert cli.main([*words, "--condition", see, "--quiet", "--out", str(tmp_path)]) == 0
    report = strict(tmp_path / "report.json")
    assert list(report["conditions"]) == list(report["attention"]) == ["baseline", "See"]
    assert "difference" in report["conditions"]["See"]["samples"]["all"]["ivm"]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--data", "x.json"), "--data needs --images, the folder of its images"),
        ((), "--data is needed: the demo world, which draws samples, is not installed"),
    ],
)
def test_without_samples_the_command_is_refused(
    more: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("eval", "stme", "--quiet", "--out", str(tmp_path), *more) == 1
    assert last_error(capsys) == f"helmsight: {message}"


@pytest.mark.usefixtures("no_model", "undrawn")
def test_tasks_are_chosen_by_name(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Looking, "focus", False)
    assert cli.main([*words, "--tasks", "CM", "--limit", "3"]) == 0
    assert list(strict(tmp_path / "out" / "report.json")["tasks"]) == ["all", "CM"]
    assert cli.main([*words, "--tasks", "TQA"]) == 1
    assert "--tasks: unknown TQA; there are CM, GPR1200" in capsys.readouterr().err
