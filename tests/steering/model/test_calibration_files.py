"""A calibration whose files change while its model is served: read again once, and never by halves."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from steering.model.calibration import FILE, Calibration, place_of
from steering.model.calibration_files import CalibrationFiles

MEASURED = Calibration("f", surprise=3.0, contexts=5)


def files(folder: Path, calibration: Calibration | None = None) -> CalibrationFiles:
    return CalibrationFiles(calibration, "f", 2, folder / "model", folder / "own")


def test_the_digest_depends_on_the_numbers_alone() -> None:
    content = {**asdict(MEASURED)}
    by_hand = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    assert MEASURED.digest == by_hand
    assert Calibration("f").digest is None
    assert replace(MEASURED, surprise=3.5).digest != by_hand
    assert MEASURED.parts == ("surprise",)


def test_the_digest_outlives_a_file(tmp_path: Path) -> None:
    calibration = MEASURED.with_divergence(torch.rand(2, 50), samples=3).with_sinks(torch.rand(2, 3, 3), 4)
    calibration.save(tmp_path)
    loaded = Calibration.load(tmp_path, "f", 2)
    assert loaded is not None
    assert loaded.digest == calibration.digest


def test_new_changed_and_removed_files_are_seen(tmp_path: Path) -> None:
    watched = files(tmp_path)
    assert watched.current() is None
    path = MEASURED.keep(tmp_path / "own")
    assert watched.current() == MEASURED
    changed = replace(MEASURED, surprise=4.0)
    changed.keep(tmp_path / "own")
    assert watched.current() == changed
    assert watched.current() is watched.current()  # read once
    same = watched.current()
    changed.keep(tmp_path / "own")
    assert watched.current() is same  # a new file with the same numbers
    (tmp_path / "model").mkdir()
    replace(MEASURED, surprise=9.0).with_sinks(torch.ones(2, 1, 1), 1).save(tmp_path / "model")
    assert (current := watched.current()) is not None
    assert (current.surprise, current.images) == (4.0, 1)  # the user's part first, the model's where that lacks one
    path.unlink()
    assert (current := watched.current()) is not None
    assert current.surprise == 9.0
    (tmp_path / "model" / FILE).unlink()
    assert watched.current() is None


def test_a_damaged_file_leaves_what_was_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MEASURED.keep(tmp_path / "own")
    watched = files(tmp_path)
    assert watched.current() == MEASURED
    place_of("f", tmp_path / "own").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert watched.current() == watched.current() == MEASURED
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the calibration in use is kept" in caplog.text
