"""`helmsight eval spd-faith` from the command line to its files, on a tiny random model and scripted servers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.harness.comparison import BASELINE
from server import cli
from tests.probes.command_line import last_error, run, strict


def test_the_command_asks_the_demo_worlds_pairs_and_goes_on_from_what_it_kept(
    model: str, tmp_path: Path, questions: list[Question]
) -> None:
    words = [
        "eval",
        "spd-faith",
        "--model",
        model,
        "--device",
        "cpu",
        "--quiet",
        "--limit",
        "2",
        "--several",
        "1",
        "--max-tokens",
        "2",
    ]
    words += ["--out", str(tmp_path), "--conditions", "API", "hint"]
    assert cli.main(words) == 0
    report = strict(tmp_path / "report.json")
    assert {name: list(parts) for name, parts in report["conditions"].items()} == {
        BASELINE: ["single", "several"], "API": ["several"], "hint": ["single"],
    }  # fmt: skip
    assert report["about"].items() >= {"single": 2, "several": 1, "seed": 0}.items()
    assert report["inside"].keys() == {"contradicting", "consistent"}
    assert any(question.diagnose is not None for question in questions)
    first = (tmp_path / "report.json").read_bytes()
    questions.clear()
    assert cli.main(words) == 0
    assert questions == []
    assert (tmp_path / "report.json").read_bytes() == first


class Server:
    """Stands in for `Endpoint`: any server that sees no difference."""

    model = "any"

    is_helmsight = False
    identity = "a server"

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str = "", timeout: float = 0) -> None:
        self.base_url = base_url
        self.concurrency = 2

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        for _ in questions:
            yield Reply("No difference.")


@pytest.mark.usefixtures("no_model")
def test_any_server_is_asked_about_published_pairs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("probes.answering.endpoint.Endpoint", Server)
    modifications = [{"type": "color", "category": "car", "target_color": "red"}, {"type": "remove", "category": "dog"}]
    rows = []
    for number in range(4):
        Image.new("RGB", (40, 60), (number, 0, 0)).save(tmp_path / f"{number}.jpg")
        chosen = modifications if number % 2 else modifications[:1]
        rows.append({"qid": str(number), "image": f"{number}.jpg", "modifications": chosen, "difficulty": "hard"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"qid": "5", "image": "5.jpg"}])))
    words = ["eval", "spd-faith", "--base-url", "http://there/v1", "--data", str(tmp_path / "rows.jsonl"), "--quiet"]
    monkeypatch.setattr("probes.spd.run.Endpoint", Server)
    words += ["--judge-url", "http://judge/v1", "--judge-model", "wise", "--judge-timeout", "5"]
    assert run(*words, "--out", str(tmp_path / "out"), "--limit", "1", "--conditions", "API", "SR") == 0
    report = strict(tmp_path / "out" / "report.json")
    assert list(report["conditions"]) == [BASELINE, "SR"]
    assert (
        "API is left out: it needs a readout of where the model looked, which only a Helmsight server has."
        in caplog.text
    )
    assert report["about"].items() >= {"single": 1, "several": 1, "left_out": {"no picture 5.jpg": 1}}.items()
    assert report["conditions"][BASELINE]["several"]["all"]["ds_detect"]["value"] == 0
    judge = report["about"]["judge"]  # of two conditions, which both count no difference that could be described
    cases = judge.pop("labelled_cases")
    assert judge == {"model": "wise at http://judge/v1", "asked": 2, "failed": 0, "unreadable": 2}
    assert cases == {"asked": 48, "failed": 0, "unreadable": 48}
    assert report["agreement"]["claims"][1] == {
        "first": "by hand", "second": "by the judge", "n": 0, "agreed": None, "kappa": None, "kappa_95": None,
    }  # fmt: skip
    page = capsys.readouterr().out
    assert "| claims | by hand | by the judge | 0 | - | - |" in page
    assert "and of labelled cases 48 times, of which 0 failed and 48 could not be read" in page


@pytest.mark.usefixtures("no_model")
def test_without_pairs_the_command_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", "spd-faith", "--out", str(tmp_path)) == 1
    assert last_error(capsys) == "helmsight: --data is needed: the demo world, which draws pairs, is not installed"
    assert run("eval", "spd-faith", "--out", str(tmp_path), "--data", str(tmp_path)) == 1
    assert "holds no pair of images of SPD-Faith Bench. A pair is a folder" in last_error(capsys)
