"""docs/batch.md, followed from its folder of pictures to its plot."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas
import pytest

from server import cli
from tests.first_hour.pages import ROOT, blocks, commands
from tests.server.batches.files import read
from tests.server.batches.home import at_home

PAGE = ROOT / "docs" / "batch.md"


def test_the_page_leads_to_its_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_home(tmp_path, monkeypatch)
    mpl.use("agg")
    draw, questions, requests, conditions, shell, plot, printed = page = blocks(PAGE)
    assert [one.language for one in page] == ["sh", "csv", "python", "toml", "sh", "python", "text"]
    assert draw.text == "for seed in $(seq 12); do helmsight demo scene --seed $seed --out pictures/$seed.png; done\n"
    for seed in range(1, 13):
        assert cli.main(["demo", "scene", "--seed", str(seed), "--out", f"pictures/{seed}.png"]) == 0
    capsys.readouterr()
    (tmp_path / "questions.csv").write_text(questions.text)
    run(requests.text)
    (tmp_path / "conditions.toml").write_text(conditions.text)
    (command,) = commands(shell.text)
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out == "60 answers, 0 failures: responses.jsonl\n"
    run(plot.text)
    names = ["baseline", "vision", "text", "sage", "strong"]
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[2:]] == names
    right = {line.split()[0]: float(line.split()[1]) for line in shown.splitlines()[2:]}
    assert right["text"] < right["baseline"] < right["vision"], "a plot on which steering changes something"
    assert shown.split() == printed.text.split()
    assert (tmp_path / "answers.png").stat().st_size > 5000
    # The table's numbers have an independent source: the responses.
    table = pandas.read_csv(tmp_path / "answers.csv").set_index(["custom_id", "condition"])
    steered = set()
    for row in read(tmp_path / "responses.jsonl"):
        (choice,) = row["response"]["body"]["choices"]
        found = table.loc[(row["custom_id"], row["condition"])]
        assert found.answer == choice["message"]["content"]
        assert found.attention_ratio == pytest.approx(choice["diagnostics"]["modality"]["attention_ratio"])
        if (choice.get("applied") or {}).get("steering"):
            steered.add((row["condition"], choice["applied"]["steering"][0]["strength"]))
    assert steered == {("vision", 1.0), ("text", 1.0), ("strong", 1.5)}


def run(program: str) -> None:
    """Run a block of a page as a program of its own."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, str(PAGE), "exec"), names)
