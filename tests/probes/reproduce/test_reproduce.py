"""The machinery of a reproduction: which commands run, and what becomes of a row."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from probes.reproduce import runs
from probes.reproduce.items import Figure, Found, Item, Json, Outcome, UnreadableRun
from probes.reproduce.report import report
from probes.reproduce.run import ITEMS, reproduce
from probes.reproduce.runs import Run
from server import cli


def _share(report: Json) -> Found:
    return Found(report["share"], report["share"] > 0.5, (report["share"] - 0.1, report["share"] + 0.1), report["n"])


HIGH = Item(1, "mp", "a share", "0.9 (Table 1)", "high", _share, "it is above a half")
LOW = replace(HIGH, id=2, run="low")
NEVER = Item(3, "sap", "what people say", "much", why="needs people")


REAL = dict(runs.RUNS)
"""The runs, before tests put made-up ones in their place."""
FEW = ("--limit", "2", "--pairs", "1")


class Commands:
    """Writes the report that a command is to write; `said` are those that ran."""

    def __init__(self, reports: dict[str, Any]):
        self.reports = reports
        self.said: list[list[str]] = []

    def __call__(self, words: Sequence[str]) -> None:
        self.said.append(list(words))
        print("much that nobody reads")
        folder = Path(words[words.index("--report" if "--report" in words else "--out") + 1])
        report = self.reports[folder.name]
        if isinstance(report, Exception):
            raise report
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report))


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runs_by_name = {
        "high": Run(("eval", "high"), ("--limit", "9"), ("--limit", "2")),
        "low": Run(("eval", "low"), steers=True),
    }
    monkeypatch.setattr(runs, "RUNS", {"probe": runs.RUNS["probe"], **runs_by_name})
    monkeypatch.setattr("probes.reproduce.run.RUNS", runs.RUNS)


def test_each_run_serves_all_its_rows_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = Commands({"high": {"share": 0.9, "n": 50}, "low": {"share": 0.1, "n": 20}})
    rows = [HIGH, LOW, replace(HIGH, id=4), NEVER]
    outcomes, runs_done = reproduce(rows, tmp_path, commands, model=None, quick=False, quiet=False)
    assert commands.said == [
        ["eval", "high", "--limit", "9", "--out", str(tmp_path / "high")],
        ["eval", "low", "--out", str(tmp_path / "low")],
    ]
    assert [outcome.verdict for outcome in outcomes] == ["appears", "does not appear", "appears", "cannot be done here"]
    first, _, _, last = (outcome.to_json() for outcome in outcomes)
    assert (first["ours"], first["interval"], first["n"]) == (0.9, [0.8, 1.0], 50)
    assert first["command"] == f"helmsight eval high --limit 9 --out {tmp_path / 'high'}"
    assert (last["ours"], last["why"], last["command"]) == (None, "needs people", "")
    assert capsys.readouterr().out == ""
    page = report({"model": "m"}, outcomes, runs_done).markdown()
    assert "| Modality preference (MP) | 2 | 1 | 0 | 0 |" in page
    assert "0.9 (0.8 to 1)" in page
    assert "- 3, what people say: needs people" in page


PLANTED = "planted: a loss asked for it"


@pytest.mark.parametrize(
    ("item", "share", "model", "verdict", "why"),
    [
        (replace(HIGH, embedded=PLANTED), 0.9, None, "nothing to measure here", PLANTED),
        (replace(HIGH, embedded=PLANTED), 0.1, None, "nothing to measure here", PLANTED),
        (replace(HIGH, embedded=PLANTED), 0.9, "/m", "appears", ""),
        (replace(HIGH, identity="identity: a count"), 0.9, "/m", "nothing to measure here", "identity: a count"),
        (HIGH, 0.99, "/m", "nothing to measure here", "ceiling: 0.99"),
        (HIGH, 2.0, "/m", "cannot be done here", "most answers are unread"),
        (HIGH, 0.1, None, "does not appear", ""),
    ],
)
def test_a_row_that_could_not_come_out_otherwise_says_why(
    item: Item, share: float, model: str | None, verdict: str, why: str, tmp_path: Path
) -> None:
    def read(report: Json) -> Found:
        if report["share"] > 1:
            raise UnreadableRun("most answers are unread")
        full = report["share"] > 0.95
        return Found(report["share"], report["share"] > 0.5, nothing=f"ceiling: {report['share']}" if full else "")

    commands = Commands({"high": {"share": share}})
    outcomes, runs_done = reproduce(
        [replace(item, read=read)], tmp_path, commands, model=model, quick=False, quiet=True
    )
    assert (outcomes[0].verdict, outcomes[0].why) == (verdict, why)
    assert outcomes[0].to_json()["model"] == (model or "demo:default")
    page = report({}, outcomes, runs_done).markdown()
    assert (f"- 1, a share: {why}" in page) is bool(why)
    assert ("What was supervised" in page) is (model is None)


def test_several_figures_have_their_intervals_by_name_and_a_plot(tmp_path: Path) -> None:
    figures = {"a": Figure(0.5, [0.4, 0.6]), "b": Figure(3), "said": Figure("4, 5"), "lacks": Figure(None)}
    outcome = Outcome(HIGH, "appears", Found.of(figures, True, 7))
    row = outcome.to_json()
    assert row["ours"] == {"a": 0.5, "b": 3, "said": "4, 5", "lacks": None}
    assert row["interval"] == {"a": [0.4, 0.6]}
    single = Outcome(replace(HIGH, id=2), "appears", Found(0.9, True, (0.8, 1.0), 7))
    page = report({}, [outcome, single], {})
    assert "a = 0.5 (0.4 to 0.6); b = 3; said = 4, 5" in page.markdown()
    page.write(tmp_path)
    drawn = (tmp_path / "mp.svg").read_text()
    assert ">1, a share<" in drawn
    assert ">2, a share<" not in drawn


def test_parallel_runs_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own; what is timed runs last."""
    runs_by_name = {name: Run(("eval", name)) for name in ("low", "third", "high")} | {
        "timed": Run(("eval", "timed"), timed=True)
    }
    monkeypatch.setattr("probes.reproduce.run.RUNS", runs_by_name)
    commands = Commands(
        {name: {"share": 0.9, "n": os.getpid()} for name in runs_by_name} | {"third": ValueError("no file")}
    )
    rows = [replace(HIGH, id=number, run=name) for number, name in enumerate(runs_by_name)]

    def command(words: Sequence[str]) -> None:
        commands(words)
        (tmp_path / f"{words[1]}.process").write_text(str(os.getpid()))

    outcomes, runs_done = reproduce(rows, tmp_path, command, model=None, quick=False, quiet=True, jobs=2)
    assert list(runs_done) == list(runs_by_name)
    assert runs_done["third"].error == "no file"
    assert outcomes[-1].verdict == "appears"
    assert not commands.said
    files = {name: tmp_path / f"{name}.process" for name in ("low", "high", "timed")}
    assert str(os.getpid()) not in [file.read_text() for file in files.values()]
    assert files["timed"].stat().st_mtime >= max(files[name].stat().st_mtime for name in ("low", "high"))


def test_a_run_that_fails_costs_its_own_rows_alone(tmp_path: Path) -> None:
    commands = Commands({"high": ValueError("no such file"), "low": {"n": 3}})
    outcomes, runs_done = reproduce([HIGH, LOW], tmp_path, commands, model=None, quick=True, quiet=True)
    assert [(outcome.verdict, outcome.why) for outcome in outcomes] == [
        ("cannot be done here", "the command failed: no such file"),
        ("cannot be done here", "the report lacks 'share'"),
    ]
    assert runs_done["high"].report is None
    assert commands.said[0] == ["eval", "high", "--limit", "2", "--out", str(tmp_path / "high"), "--quiet"]


def test_a_run_of_another_embedded_model_names_it_unless_the_user_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.reproduce.run.RUNS", {"high": Run(("eval", "high"), model="demo:prior")})
    for model, named in ((None, "demo:prior"), ("/m", "/m")):
        commands = Commands({"high": {"share": 0.6, "n": 1}})
        outcomes, _ = reproduce([HIGH], tmp_path, commands, model=model, quick=True, quiet=True)
        assert commands.said[0][2:4] == ["--model", named]
        assert outcomes[0].model == named


def test_another_model_is_steered_by_a_vector_of_its_own(tmp_path: Path) -> None:
    commands = Commands({"probe": {}, "low": {"share": 0.6, "n": 1}})
    reproduce([LOW], tmp_path, commands, model="/m", quick=True, quiet=True)
    probe, low = commands.said
    vector = str(tmp_path / "probe" / "vector.safetensors")
    assert probe[probe.index("--report") + 1] == str(tmp_path / "probe")
    assert vector in probe
    assert low == ["eval", "low", "--model", "/m", "--vector", vector, "--out", str(tmp_path / "low"), "--quiet"]


@pytest.mark.parametrize("wrong", [{"run": None}, {"read": None}, {"why": "x"}, {"run": None, "read": None, "why": ""}])
def test_a_row_is_measured_or_says_why_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Item 1 needs a run"):
        replace(HIGH, **wrong)


def test_the_rows_are_numbered_once() -> None:
    numbers = [row.id for row in ITEMS]
    assert len(set(numbers)) == len(numbers)
    assert sorted(numbers) == numbers
    assert set(numbers) <= set(range(1, 83))


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "again to continue"),
        (ValueError("no weights"), 1, "no run completed.* no weights"),
    ],
)
def test_if_every_run_fails_the_old_report_stays(
    error: BaseException, status: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("steering.load", fails)
    monkeypatch.setattr(
        "probes.reproduce.run.RUNS", {"sage": Run(("eval", "sage", "--conditions", "baseline"), (), FEW)}
    )
    monkeypatch.setattr("probes.reproduce.run.ITEMS", [replace(HIGH, run="sage")])
    (tmp_path / "report.json").write_text("before")
    assert cli.main(["reproduce", "--quick", "--jobs", "1", "--out", str(tmp_path)]) == status
    assert re.search(message, capsys.readouterr().err)
    assert (tmp_path / "report.json").read_text() == "before"


@pytest.mark.usefixtures("short_answers")
def test_the_command_runs_all_benchmarks_on_one_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = []
    import steering

    load = steering.load
    monkeypatch.setattr(steering, "load", lambda *args, **more: loaded.append(args) or load(*args, **more))
    runs_by_name = {
        name: Run(("eval", "sage", "--conditions", "baseline"), (*FEW, "--seed", name[-1]))
        for name in ("sage-1", "sage-2")
    }
    monkeypatch.setattr("probes.reproduce.run.RUNS", runs_by_name)
    rows = [
        replace(HIGH, id=number, run=name, read=lambda report: Found(report["about"]["seed"], True))
        for number, name in enumerate(runs_by_name)
    ]
    monkeypatch.setattr("probes.reproduce.run.ITEMS", rows)
    assert cli.main(["reproduce", "--quiet", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert len(loaded) == 1
    assert [row["ours"] for row in json.loads((tmp_path / "report.json").read_text())["rows"]] == [1, 2]
    assert "2 appears" in capsys.readouterr().out


def test_every_run_loads_the_model_with_the_same_options(tmp_path: Path) -> None:
    loading = ("--dtype", "bfloat16", "--download")
    for name, run in REAL.items():
        words = run.command(name, tmp_path, quick=True, model="acme/model-7b", loading=loading)
        last_words = [*words[: len(words) - len(run.place)]][-3:]
        assert (last_words == [*loading]) != run.fixed, name
