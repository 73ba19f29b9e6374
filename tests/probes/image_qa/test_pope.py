"""POPE's files, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from probes.harness.comparison import compare
from probes.image_qa.pope import load
from probes.image_qa.yes_no import YesNo
from probes.pope.task import TASK
from tests.probes.conftest import Scripted

ROW = '{"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is there a star?", "label": "yes"}\n'


def write(folder: Path, text: str, name: str = "coco_pope_popular.json") -> Path:
    Image.new("RGB", (56, 56), "red").save(folder / "COCO_val2014_000000000001.jpg")
    (folder / name).write_text(text)
    return folder / name


def test_rows_become_questions_whose_image_is_opened_when_asked(tmp_path: Path) -> None:
    samples = load([write(tmp_path, ROW + ROW.replace("yes", "no"))], tmp_path)
    image = tmp_path / "COCO_val2014_000000000001.jpg"
    assert samples == [YesNo(image, "Is there a star?", present, "popular") for present in (True, False)]
    results = compare(Scripted(lambda _: "Yes."), {"baseline": ()}, TASK.parts(samples), max_tokens=4, quiet=True)
    assert {name: condition["accuracy"]["value"] for name, condition in results["baseline"]["existence"].items()} == {
        "all": 0.5,
        "popular": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (ROW, "questions.json", "must hold one of"),
        ("{", "coco_pope_random.json", "line 1: not JSON"),
        ("3\n", "coco_pope_random.json", "row 1: it is not an object"),
        (
            ROW + ROW.replace("yes", "maybe"),
            "coco_pope_random.json",
            "row 2: its answer must be yes or no; got 'maybe'",
        ),
        (ROW.replace("0001", "0002"), "coco_pope_random.json", "there is no image"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load([write(tmp_path, text, name)], tmp_path)


def test_a_missing_file_is_reported_before_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"questions\.json"):
        load([tmp_path / "questions.json"], tmp_path)


def test_of_a_folder_the_published_files_are_read(tmp_path: Path) -> None:
    settings = [write(tmp_path, ROW, f"coco_pope_{setting}.json") for setting in ("popular", "adversarial")]
    (tmp_path / "instances_val2014.json").write_text("{}")
    assert TASK.files(tmp_path) == sorted(settings)
    assert TASK.files(settings[0]) == settings[:1]
    empty = tmp_path / "none"
    empty.mkdir()
    with pytest.raises(ValueError, match="no file is called"):
        TASK.files(empty)
