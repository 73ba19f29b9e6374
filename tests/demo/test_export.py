"""Conflicts in files: what the loader of MC2 reads is what was drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo.world.conflicts import conflict_samples, write_conflicts
from probes.conflicts import file as mc2_file
from probes.conflicts import samples as mc2
from server.cli import main

COUNT = 9  # every kind, and the first once more


def test_the_loader_reads_what_the_command_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "conflicts", "--count", str(COUNT), "--seed", "3", "--folder", str(tmp_path / "set")]) == 0
    assert f"{COUNT} conflicts in {tmp_path / 'set' / 'conflicts.json'}" in capsys.readouterr().out
    drawn = conflict_samples(COUNT, seed=3)
    loaded = mc2_file.load(tmp_path / "set" / "conflicts.json", tmp_path / "set" / "images")
    assert len(loaded) == COUNT
    for mine, read in zip(drawn, loaded, strict=True):
        assert mine.id in read.id
        assert mine.picture().tobytes() == read.picture().tobytes()
        for setting in ("plain", "text", "image_only"):
            assert mc2.prompt(mine, setting, swapped=True) == mc2.prompt(read, setting, swapped=True)
        assert (mine.task, mine.answer_vision, mine.answer_text) == (read.task, read.answer_vision, read.answer_text)


def test_the_folder_holds_the_rows_and_one_png_each(tmp_path: Path) -> None:
    files = write_conflicts(conflict_samples(3, seed=1, size=(84, 84)), tmp_path)
    assert files[-1] == tmp_path / "conflicts.json"
    assert {file for file in tmp_path.rglob("*") if file.is_file()} == set(files)
    rows = json.loads(files[-1].read_text())
    assert [row["image_id"] for row in rows] == ["world-1-0.png", "world-1-1.png", "world-1-2.png"]
    assert set(rows[0]) == {"image_id", "task", "question", "answer_vision", "answer_text", "context"}
