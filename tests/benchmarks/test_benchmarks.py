"""The results are the latest figures of the history, whoever ran what of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import run, sizing
from benchmarks.results import FOLDER, UNEXPLAINED, Figure, Row, as_table, keep, latest, page, reasons
from tests.first_hour.pages import ROOT, blocks

SPEED = Row("16 sequential / 16 concurrent", 6.68, (6.31, 7.18), 6.68, ">= 8", "generate() 3.340 s, engine 0.500 s")
LATENCY = Row("one request / generate()", 0.85, (0.8, 0.9), 0.84, "<= 0.9", "")
MEMORY = Row("peak memory", 1.017, None, None, "-", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "HISTORY.md").write_text("# History\n\nNewest last.\n")
    keep_at(tmp_path, "2026-01-01 08:00 UTC", [("demo", SPEED), ("demo", LATENCY), ("wide", MEMORY)], "throughput")
    return tmp_path


def keep_at(folder: Path, date: str, rows: list[tuple[str, Row]], names: str) -> None:
    keep(
        as_table(rows), date=date, machine="A Processor, 2 CPUs, load 1.0", versions="Python 3.11",
        command=f"python -m benchmarks.run {names}", folder=folder,
    )  # fmt: skip


def rows_of(results: str) -> list[list[str]]:
    """Return the cells of all tables, with the date of each table before and its machine and command behind."""
    rows, date, run = [], "", ""
    for line in results.splitlines():
        if line.startswith("## "):
            date, run = line[3:], ""
        elif line.startswith("| ") and not line.startswith("| model "):
            rows.append([date, *(cell.strip() for cell in line.strip("|").split("|")), run])
        elif line and date and not run:
            run = line
    return rows


def test_a_run_has_its_machine_and_command_once_and_a_figure_its_spread_and_aim(folder: Path) -> None:
    run_of = "A Processor, 2 CPUs, load 1.0; `python -m benchmarks.run throughput`"
    results = (folder / "RESULTS.md").read_text()
    date = "2026-01-01 08:00 UTC"
    assert rows_of(results) == [
        [date, "demo", "16 sequential / 16 concurrent", "6.680", "6.31 to 7.18", ">= 8", "**no**", UNEXPLAINED, run_of],
        [date, "demo", "one request / generate()", "0.850", "0.80 to 0.90", "<= 0.9", "yes", "", run_of],
        [date, "wide", "peak memory", "1.017", "-", "-", "-", "", run_of],
    ]
    assert results.count(run_of) == results.count(date) == 1
    assert "1 of 2 aims are missed." in results


def test_a_missed_aim_has_its_reason_until_it_is_measured_anew(folder: Path) -> None:
    (folder / "reasons.toml").write_text(
        f'[[missed]]\nmodel = "demo"\nwhat = "{SPEED.title}"\ndate = "2026-01-01 08:00 UTC"\nwhy = "a reason"\n'
    )
    keep_at(folder, "2026-01-02 09:00 UTC", [("wide", SPEED)], "throughput")
    why = {tuple(row[:3]): row[7] for row in rows_of((folder / "RESULTS.md").read_text())}
    assert why["2026-01-01 08:00 UTC", "demo", SPEED.title] == "a reason"
    assert why["2026-01-02 09:00 UTC", "wide", SPEED.title] == UNEXPLAINED
    keep_at(folder, "2026-01-03 09:00 UTC", [("demo", SPEED)], "throughput")
    why = {tuple(row[:3]): row[7] for row in rows_of((folder / "RESULTS.md").read_text())}
    assert why["2026-01-03 09:00 UTC", "demo", SPEED.title] == UNEXPLAINED
    assert "a reason" not in why.values()


def test_a_later_run_takes_the_place_of_what_it_measured_anew_and_of_nothing_else(folder: Path) -> None:
    before = (folder / "HISTORY.md").read_text()
    faster = Row(SPEED.title, 8.0, (7.0, 9.0), 8.0, SPEED.aim, SPEED.detail)
    keep_at(folder, "2026-01-02 09:00 UTC", [("demo", faster), ("wide", SPEED)], "latency")
    rows = rows_of((folder / "RESULTS.md").read_text())
    assert [(row[0][:10], row[1], row[2], row[3], row[6]) for row in rows] == [
        ("2026-01-02", "demo", SPEED.title, "8.000", "yes"),
        ("2026-01-02", "wide", SPEED.title, "6.680", "**no**"),
        ("2026-01-01", "demo", LATENCY.title, "0.850", "yes"),
        ("2026-01-01", "wide", MEMORY.title, "1.017", "-"),
    ]
    after = (folder / "HISTORY.md").read_text()
    assert after.startswith(before)
    assert "## 2026-01-02 09:00 UTC\n\nA Processor, 2 CPUs, load 1.0; Python 3.11\n\n" in after[len(before) :]


@pytest.mark.parametrize(
    ("ratio", "aim", "missed"),
    [(0.9, "<= 0.9", False), (0.901, "<= 0.9", True), (8, ">= 8", False), (7.99, ">= 8", True), (99, "-", False)],
)
def test_an_aim_is_missed_on_one_side_only(ratio: float, aim: str, missed: bool) -> None:
    assert Figure("demo", "what", ratio, "-", aim, "", "", "").missed is missed


def test_tables_of_another_kind_and_notes_in_the_history_are_no_figures() -> None:
    history = (
        "# History\n\n## 2026-01-01\n\nA machine; versions\n\nA note.\n\n`python -m benchmarks.versions A B`\n\n"
        "| what | new / old | old | new |\n|---|---|---|---|\n| one request | **1.172** | 1 ms | 2 ms |\n"
    )
    assert latest(history) == []


def test_the_committed_results_are_those_of_the_committed_history() -> None:
    figures = latest((FOLDER / "HISTORY.md").read_text())
    assert (FOLDER / "RESULTS.md").read_text() == page(figures, reasons())
    assert {figure.model for figure in figures} == {"demo", "wide"}
    assert all(f.command.startswith("python -m benchmarks.run") and "CPU" in f.machine for f in figures)
    (spin,) = [f for f in figures if (f.model, f.what) == ("wide", "OpenMP's default wait / helmsight's, 1 at once")]
    assert (spin.ratio, spin.spread, spin.missed, spin.date) == (0.856, "0.73-1.32", True, "2026-11-22 02:24 UTC")


def test_each_missed_aim_and_no_other_has_a_reason() -> None:
    missed = {(f.model, f.what, f.date) for f in latest((FOLDER / "HISTORY.md").read_text()) if f.missed}
    assert missed == reasons().keys()


def test_a_run_writes_both_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "keep", lambda *args, **kwargs: keep(*args, **kwargs, folder=folder))
    monkeypatch.setattr(run, "peak_rows", lambda workload, threads: [MEMORY])
    monkeypatch.setattr(run.torch, "set_num_threads", lambda threads: None)
    assert run.main(["memory", "--models", "demo", "--write"]) == 0
    (row,) = [row for row in rows_of((folder / "RESULTS.md").read_text()) if row[1:3] == ["demo", "peak memory"]]
    assert row[-1].endswith("; `python -m benchmarks.run memory --models demo --write`")
    assert "CPUs, load" in row[-1]


def test_the_command_that_the_page_of_tuning_shows_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks(ROOT / "docs" / "tuning.md")
    words = block.text.split()
    assert words[:3] == ["python", "-m", "benchmarks.sizing"]

    def load(path: str, **_: object) -> None:
        raise ValueError(path)

    monkeypatch.setattr(sizing.steering, "load", load)
    with pytest.raises(ValueError, match=r"^/models/Qwen2\.5-VL-7B-Instruct$"):
        sizing.main(words[3:])
