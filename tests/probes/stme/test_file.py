"""STME's rows, in the form that the authors' scripts read, as samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.stme.file import TAIL, load
from probes.stme.samples import TargetSample

CM = {
    "dataset_name": "CM", "sample_id": 1189, "context": "<ImageHere><ImageHere>Which image shows two dogs?",
    "raw_img_list": ["/cpfs/user/data/CM/images/a.jpg", "/cpfs/user/data/CM/images/b.jpg"], "target_id": 2, "response": "2",
}  # fmt: skip
TQA = {
    "dataset_name": "TQA", "sample_id": 171,
    "context": "Read.\nImage 1: <ImageHere>\nImage 2: <ImageHere>\nWhat is its mass?\nChoice List: \n27\n13\n"
    "Your answer is: ",
    "raw_img_list": ["CM/images/b.jpg", "a.jpg"], "target_id": 1, "response": "27", "answer": "by GPT-4o",
}  # fmt: skip

Rows = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "CM" / "images").mkdir(parents=True)
    Image.new("RGB", (80, 40), "red").save(tmp_path / "CM" / "images" / "a.jpg")
    Image.new("RGB", (80, 40), "green").save(tmp_path / "CM" / "images" / "b.jpg")
    Image.new("RGB", (2000, 1000), "blue").save(tmp_path / "a.jpg")
    return tmp_path


@pytest.fixture
def rows(folder: Path) -> Rows:
    def written(*rows: Any) -> Path:
        file = folder / "merged_result_easy.json"
        file.write_text(json.dumps(rows))
        return file

    return written


def only(file: Path, folder: Path, **options: Any) -> TargetSample:
    (sample,), left_out = load([file], folder, **options)
    assert len(left_out) == 0
    return sample


def test_a_caption_becomes_a_sample(folder: Path, rows: Rows) -> None:
    sample = only(rows(CM), folder)
    assert sample.images == (folder / "CM/images/a.jpg", folder / "CM/images/b.jpg")  # by the end of their paths
    assert (sample.id, sample.texts, sample.target) == ("CM-1189", ("", "", "Which image shows two dogs?"), 2)
    assert (sample.response, sample.choices, sample.tail, sample.difficulty) == ("2", (), "", "easy")


def test_a_question_with_the_options_of_milebench(folder: Path, rows: Rows) -> None:
    milebench = folder / "MileBench" / "TQA" / "TQA.json"
    milebench.parent.mkdir(parents=True)
    row = {"sample_id": "171", "task_instance": {"choice_list": ["27", "13"]}}
    milebench.write_text(json.dumps({"meta_data": {}, "data": [row]}))
    sample = only(rows(TQA), folder, choices=folder / "MileBench")
    assert (sample.choices, sample.response, sample.difficulty) == (("27", "13"), "27", "hard")
    assert sample.texts[:2] == ("Read.\nImage 1: ", "\nImage 2: ")
    # What asks for the answer makes way for what asks for reasons; the script cuts off all of its characters.
    assert (sample.texts[2], sample.tail) == ("\nWhat is its mass?\nChoice List: \n27\n13\n", TAIL)
    assert sample.picture(2).size == (817, 408)  # two pictures have 1280 * 28 * 28 / 3 pixels each at most
    assert only(rows(TQA), folder, full_size=True).picture(2).size == (2000, 1000)
    assert only(rows(TQA), folder).choices == ()
    assert only(rows(TQA | {"choice_list": ["27", "3"]}), folder).choices == ("27", "3")


def test_a_question_that_ends_otherwise_keeps_its_letters(folder: Path, rows: Rows) -> None:
    context = (
        "Image 1: <ImageHere>\nImage 2: <ImageHere>\nWhich shape is it, star or square"  # ends by letters of the phrase
    )
    sample = only(rows(TQA | {"context": context, "response": "square"}), folder)
    assert sample.texts[-1] == "\nWhich shape is it, star or square"


def test_unusable_rows_are_left_out_and_named(folder: Path, rows: Rows, caplog: pytest.LogCaptureFixture) -> None:
    good = [CM | {"sample_id": number} for number in range(20)]
    samples, left_out = load(
        [rows(*good, TQA | {"target_id": None}, CM | {"raw_img_list": ["x.jpg", "a.jpg"]})], folder
    )
    assert (len(samples), len(left_out)) == (20, 2)
    message = "2 samples are left out: an image is missing: CM-1189; no image is the target: TQA-171"
    assert caplog.messages == [message]
    few_rows = rows(CM, TQA | {"target_id": 3})
    with pytest.raises(ValueError, match=r"1 of 2 samples cannot be asked \(at most 10% may be missing\): no image"):
        load([few_rows], folder)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([CM, CM], "row 2: sample CM-1189 stands in .*, row 1 already"),
        ([CM | {"context": "Which image?"}], "row 1: 2 images for 0 times <ImageHere>"),
        ([CM | {"response": "the dogs"}], "the response to a caption must be the number of an image; got 'the dogs'"),
        ([TQA | {"choice_list": ["1", "2"]}], "the response '27' is not among the options"),
        ([{"dataset_name": "CM"}], "row 1: not a sample of STME: KeyError\\('sample_id'\\)"),
        ([], "must be a list of samples"),
    ],
)
def test_wrong_rows_are_one_sentence(folder: Path, rows: Rows, table: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load([rows(*table)], folder)


def test_a_file_that_is_no_json(folder: Path) -> None:
    (folder / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not JSON"):
        load([folder / "x.json"], folder)


@pytest.mark.parametrize("options", ["27", 5, {"a": 1}])
def test_options_that_are_no_list_are_named_with_their_row(options: Any, folder: Path, rows: Rows) -> None:
    with pytest.raises(ValueError, match=r"row 2: 'choice_list' must be a list of options; got"):
        load([rows(CM, {**TQA, "choice_list": options})], folder)
