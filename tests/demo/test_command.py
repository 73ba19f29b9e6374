"""`helmsight demo`: what is wrong is one line, and folders are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from demo.training import train as training
from server.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "--steps", "3"], "--steps 3: must be a multiple of 25"),
        (["train", "--steps", "0"], "--steps 0, --ranks 2: both must be at least 1"),
        (["train", "--ranks", "2", "--device", "cuda"], "--ranks 2 --device cuda: several ranks are for the CPU"),
        (["evaluate", "--checkpoint", "/nowhere"], "--checkpoint /nowhere: there is no such folder"),
        (["scene", "--out", "file/scene.png"], "file cannot be written to: file is no folder"),
        (["scene", "--out", ".."], ".. is a folder; name a file"),
        (["scene", "--out", "scene"], "--out scene: its name must end as an image's, such as in .png"),
        (
            ["scene", "--size", "100000", "100000"],
            "size (100000, 100000): a picture may have at most 4096 x 4096 pixels",
        ),
    ],
)
def test_errors_are_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["demo", *words]) == 1
    assert capsys.readouterr().err == f"helmsight: {message}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_scene_is_drawn_into_a_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "scene.png"
    assert main(["demo", "scene", "--seed", "5", "--size", "120", "80", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["picture"] == str(out)
    with Image.open(out) as picture:
        assert picture.size == (120, 80)


def test_conflicts_are_at_least_one_and_replace_others_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "conflicts", "--folder", str(tmp_path)]
    for count in ("0", "-3"):
        assert main([*words, "--count", count]) == 2
        assert "greater than or equal to 1" in capsys.readouterr().err
    path = tmp_path / "conflicts.json"
    path.write_text("[400 samples]")
    assert main([*words, "--count", "1"]) == 1
    assert capsys.readouterr().err == (
        f"helmsight: {path} already exists; --replace overwrites it, --folder names another folder\n"
    )
    assert (path.read_text(), list(tmp_path.iterdir())) == ("[400 samples]", [path])
    assert main([*words, "--count", "1", "--replace"]) == 0
    assert len(json.loads(path.read_text())) == 1


def test_training_that_is_stopped_says_that_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", stopped)
    assert main(["demo", "train", "--folder", str(tmp_path)]) == 130
    assert "Stopped. Run the same command again to resume from the last saved step." in capsys.readouterr().err
