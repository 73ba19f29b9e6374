"""MM-SAP's questions from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.harness.conditions import Wanted
from probes.harness.options import ModelOptions
from probes.harness.session import Setup
from probes.mmsap.file import load
from probes.mmsap.run import SapOptions
from steering.interventions.refusal import REFUSAL

ROW = {
    "id": 7, "image": "cat.jpg", "type": "Color", "question": "What color is the cat?", "answer": "C",
    "options": ["A. black", f"B. {REFUSAL}", "C. white", "D. red"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "cat.jpg")
    return tmp_path


def write(folder: Path, name: str, *rows: Any) -> Path:
    file = folder / name
    lines = "\n".join(map(json.dumps, rows)) if file.suffix == ".jsonl" else json.dumps(list(rows))
    file.write_text(lines)
    return file


def test_the_three_parts_of_a_folder(folder: Path) -> None:
    write(folder, "BasicVisQA.json", ROW)
    write(
        folder,
        "KnowVisQA.jsonl",
        ROW | {"options": {"A": "cat", "B": "lynx", "C": "Sorry, I can\u2019t help with it."}, "answer": "lynx"},
    )
    letters = {"A": "Tom", "B": "Sorry, I can't help with it", "C": "Kitty"}
    write(folder, "beyond_vis_qa.json", {key: ROW[key] for key in ("image", "question")} | letters | {"answer": "B"})
    write(folder, "notes.json", {"no": "question"})
    basic, beyond, know = sorted(load(folder), key=lambda sample: sample.part)
    assert (basic.id, basic.part, basic.subtask, basic.options, basic.answer) == (
        "basic 7", "basic", "Color", ("black", "white", "red"), "white",
    )  # fmt: skip
    assert (know.options, know.answer) == (("cat", "lynx"), "lynx")
    assert (beyond.id, beyond.options, beyond.answer) == ("beyond 1", ("Tom", "Kitty"), None)
    assert basic.image == folder / "cat.jpg"
    assert len(basic.chats(2, 0)) == 2
    assert len(know.chats(2, 0)) == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": None}, "it has no question or query or Q"),
        ({"answer": "E"}, "its answer 'E' is not among its options"),
        ({"answer": "B"}, "of BasicVisQA, its answer is the refusal"),
        ({"answer": None}, "of BasicVisQA, its answer is the refusal"),
        ({"part": "BeyondVisQA"}, "of BeyondVisQA, its answer is 'white'"),
        ({"options": ["one"]}, "it needs at least two different options beside the refusal"),
        ({"options": "white or black"}, "its options are 'white or black'"),
        ({"image": "dog.jpg"}, r"there is no image .*dog\.jpg"),
    ],
)
def test_invalid_rows_are_named(folder: Path, row: dict[str, Any], message: str) -> None:
    file = write(folder, "BasicVisQA.json", ROW, ROW | row)
    with pytest.raises(ValueError, match=rf"BasicVisQA\.json, row 2: {message}"):
        load(file)


def test_files_of_another_format_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"holds none of MM-SAP's files, whose names hold the part: BasicVisQA\.json"):
        load(folder)
    with pytest.raises(
        ValueError, match=r"rows\.json, row 1: neither its part nor the file's name is one of BasicVisQA"
    ):
        load(write(folder, "rows.json", ROW))
    with pytest.raises(ValueError, match="holds no questions"):
        load(write(folder, "know.json"))
    (folder / "know.json").write_text("image,question")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        load(folder / "know.json")


def test_unusable_rows_are_left_out_and_reported(folder: Path) -> None:
    """Among twenty-two samples one has no picture and is left out, and one has a broken picture that is drawn."""
    (folder / "broken.jpg").write_bytes(b"no picture")
    rows = [ROW | {"id": number} for number in range(20)]
    write(folder, "BasicVisQA.json", *rows, ROW | {"image": "dog.jpg"}, ROW | {"image": "broken.jpg"})
    conditions = Wanted(None, (), list)
    setup = Setup(ModelOptions("nothing"), 100, 0, True, folder)
    left_out: list[str] = []
    samples = SapOptions(conditions, 1, str(folder / "BasicVisQA.json"), None, None).draw(setup, left_out)
    assert {sample.id for sample in samples} == {f"basic {number}" for number in range(20)}
    assert ["there is no image" in left_out[0], "does not decode" in left_out[1], len(left_out)] == [True, True, 2]
    assert samples[0].expected == "white"
