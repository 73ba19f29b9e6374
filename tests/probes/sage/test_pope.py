"""POPE's files, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from probes.answering.engine import InProcess
from probes.sage.evaluate import evaluate
from probes.sage.pope import load
from probes.sage.samples import Existence
from steering import Engine

ROW = '{"question_id": 1, "image": "COCO_val2014_000000000001.jpg", "text": "Is there a star?", "label": "yes"}\n'


def write(folder: Path, text: str, name: str = "coco_pope_popular.json") -> Path:
    Image.new("RGB", (56, 56), "red").save(folder / "COCO_val2014_000000000001.jpg")
    (folder / name).write_text(text)
    return folder / name


def test_rows_become_questions_whose_image_is_opened_when_asked(tmp_path: Path, tiny: Engine) -> None:
    samples = load([write(tmp_path, ROW + ROW.replace("yes", "no"))], tmp_path)
    image = tmp_path / "COCO_val2014_000000000001.jpg"
    assert samples == [Existence(image, "Is there a star?", present, "popular") for present in (True, False)]
    report = evaluate(InProcess(tiny), {"baseline": ()}, samples, [], (), quiet=True)
    assert set(report["baseline"]["existence"]) == {"all", "popular"}


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (ROW, "questions.json", "must hold one of"),
        ("{", "coco_pope_random.json", "line 1: no POPE question"),
        ("[]\n", "coco_pope_random.json", "line 1: no POPE question"),
        (ROW + ROW.replace("yes", "maybe"), "coco_pope_random.json", "line 2: the label"),
        (ROW.replace("0001", "0002"), "coco_pope_random.json", "there is no image"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load([write(tmp_path, text, name)], tmp_path)
