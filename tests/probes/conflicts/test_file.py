"""The loader of MC2's file: where images are looked for, and what is said of a file that is not right."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.conflicts import file as mc2_file
from probes.conflicts.samples import ConflictSample

ROW: dict[str, Any] = {
    "image_id": "000000046962",
    "task": "color",
    "question": "What color is the ball?",
    "answer_vision": "red",
    "answer_text": "blue",
    "context": "The ball is blue.",
}


def row(number: int, **more: Any) -> dict[str, Any]:
    return ROW | {"image_id": f"{number:012}"} | more


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in row(2).items() if key != name}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images 0 to 9, under the names of COCO 2017."""
    path = tmp_path / "coco"
    path.mkdir()
    for number in range(10):
        Image.new("RGB", (6, 4), (number, 0, 0)).save(path / f"{number:012}.jpg")
    return path


def load(folder: Path, rows: object, **more: Any) -> list[ConflictSample]:
    path = folder.parent / "mc2.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return mc2_file.load(path, folder, **more)


@pytest.mark.parametrize("image_id", ["000000046962", 46962, "46962"])
@pytest.mark.parametrize(
    "file",
    [
        "train2014/COCO_train2014_000000046962.jpg",
        "val2014/COCO_val2014_000000046962.jpg",
        "COCO_train2014_000000046962.jpg",
        "COCO_val2014_000000046962.jpg",
        "000000046962.jpg",
    ],
)
def test_coco_names_are_resolved(tmp_path: Path, file: str, image_id: object) -> None:
    image = tmp_path / "coco" / file
    image.parent.mkdir(parents=True)
    Image.new("L", (6, 4), 200).save(image)
    (sample,) = load(tmp_path / "coco", [ROW | {"image_id": image_id}])
    assert sample.image == image
    assert (sample.picture().size, sample.picture().mode) == ((6, 4), "RGB")


@pytest.mark.parametrize("name", ["000000000003.jpg", "val2014/COCO_val2014_000000000003.jpg"])
def test_an_image_id_may_be_a_file_name(folder: Path, name: str) -> None:
    (folder / "val2014").mkdir()
    Image.new("RGB", (6, 4)).save(folder / "val2014" / "COCO_val2014_000000000003.jpg")
    (sample,) = load(folder, [row(0, image_id=name)])
    assert sample.image == folder / name


def test_a_row_becomes_a_sample_named_by_its_image_and_row(folder: Path) -> None:
    rows = [
        row(3),
        row(4, question="  How many?\n", answer_vision="2 ", answer_text=" 3", context="\tThree. ", task="count"),
    ]
    first, second = load(folder, rows)
    assert first == ConflictSample(
        id="000000000003-0", task="color", image=folder / "000000000003.jpg", question="What color is the ball?",
        answer_vision="red", answer_text="blue", context="The ball is blue.",
    )  # fmt: skip
    assert (second.id, second.task, second.question) == ("000000000004-1", "count", "How many?")
    assert (second.answer_vision, second.answer_text, second.context) == ("2", "3", "Three.")


def test_one_image_may_have_several_questions(folder: Path) -> None:
    samples = load(folder, [row(1), row(1, question="What shape is it?")])
    assert [sample.id for sample in samples] == ["000000000001-0", "000000000001-1"]


def test_a_nested_context_is_taken_out(folder: Path) -> None:
    (sample,) = load(folder, [row(0, context={"icc": " The ball is blue. ", "other": "x"})])
    assert sample.context == "The ball is blue."


def test_fields_that_are_not_known_do_not_matter(folder: Path) -> None:
    assert len(load(folder, [row(0, source="icc", score=3)])) == 1


@pytest.mark.parametrize("name", ["image_id", "task", "question", "answer_vision", "answer_text", "context"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [("absent", "None"), ("", "''"), (" \n", r"' \\n'"), (None, "None"), (["x"], r"\['x'\]"), (True, "True")],
)
def test_a_row_with_a_bad_field_is_named(folder: Path, name: str, value: object, expected: str) -> None:
    bad = without(name) if value == "absent" else row(2, **{name: value})
    with pytest.raises(ValueError, match=rf"mc2\.json, row 2: '{name}' must be a non-empty string, got {expected}$"):
        load(folder, [row(1), bad])


@pytest.mark.parametrize("context", [{}, {"icc": ""}, {"iac": "The ball is blue."}, {"icc": {"icc": "blue"}}])
def test_a_nested_context_must_be_a_text_too(folder: Path, context: object) -> None:
    with pytest.raises(ValueError, match="row 1: 'context' must be a non-empty string"):
        load(folder, [row(0, context=context)])


@pytest.mark.parametrize("name", ["question", "answer_text"])
def test_only_an_image_may_be_named_by_a_number(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"row 1: {name!r} must be a non-empty string, got 3"):
        load(folder, [row(0, **{name: 3})])


@pytest.mark.parametrize(("value", "kind"), [(["not", "an"], "list"), ("text", "str"), (None, "NoneType"), (3, "int")])
def test_a_row_that_is_no_object_is_named(folder: Path, value: object, kind: str) -> None:
    with pytest.raises(ValueError, match=f"row 2: must be an object, not {kind}"):
        load(folder, [row(0), value])


def test_answers_that_do_not_differ_are_no_conflict(folder: Path) -> None:
    with pytest.raises(ValueError, match="row 2: both answers are 'Red', so there is no conflict"):
        load(folder, [row(0), row(1, answer_vision="red", answer_text="Red ")])


def test_a_row_that_stands_twice_is_named_with_the_first(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"row 4: the same sample as row 2 \(image 000000000002\)"):
        load(folder, [row(1), row(2), row(3), row(2, answer_text=" blue ", context={"icc": "The ball is blue."})])


def test_a_row_that_stands_twice_is_found_also_where_its_image_is_missing(folder: Path) -> None:
    with pytest.raises(ValueError, match="row 12: the same sample as row 11"):
        load(folder, [*map(row, range(10)), row(77), row(77)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no samples"),
        ({"a": 1}, "must be a list of samples, not dict"),
        ("x", "not str"),
        (None, "not NoneType"),
    ],
)
def test_a_file_without_a_list_of_samples_is_refused(folder: Path, rows: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"mc2\.json .*{message}"):
        load(folder, rows)


@pytest.mark.parametrize("content", [b"", b"[{]", b"\xff\xfe\x00", b'[{"image_id": "1"'])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not JSON"):
        mc2_file.load(path, tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"nothing\.json"):
        mc2_file.load(tmp_path / "nothing.json", tmp_path)


def test_a_few_missing_images_are_named_and_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*map(row, range(5)), row(77), *map(row, range(5, 9))]
    with caplog.at_level(logging.WARNING):
        samples = load(folder, rows)
    assert [sample.id for sample in samples] == [f"{n:012}-{n + (n >= 5)}" for n in range(9)]
    (record,) = caplog.records
    assert "1 of 10 images are not in" in record.getMessage()
    assert "000000000077 (row 6)" in record.getMessage()


def test_no_warning_where_no_image_is_missing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load(folder, list(map(row, range(10))))) == 10
    assert not caplog.records


def test_more_missing_images_than_allowed_are_an_error(folder: Path) -> None:
    rows = [*map(row, range(8)), row(77), row(78)]
    with pytest.raises(
        ValueError, match=r"2 of the 10 images .* \(at most 10% may be missing\): 000000000077 \(row 9\), 0"
    ):
        load(folder, rows)
    assert len(load(folder, rows, max_missing=0.2)) == 8


def test_a_folder_without_any_image_is_an_error_that_says_what_belongs_there(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    rows = [row(number) for number in range(30)]
    with pytest.raises(ValueError, match=r"30 of the 30 images .*empty, under their own or their COCO 2014") as caught:
        load(empty, rows)
    assert "(row 20), ..." in str(caught.value)
    assert "(row 21)" not in str(caught.value)


def test_a_malformed_row_is_told_before_missing_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 2: 'task'"):
        load(tmp_path, [row(0), row(1, task="")])


@pytest.mark.parametrize(
    "image_id",
    [
        "../secret.jpg",
        "..",
        ".",
        "val2014/../../secret.jpg",
        "ABSOLUTE",
        "a/b/c.jpg",
        "000000000001\x00",
        "~/secret.jpg",
        "*.jpg",
    ],
)
def test_an_image_id_cannot_leave_the_folder(folder: Path, image_id: str) -> None:
    (folder / "val2014").mkdir()
    secret = folder.parent / "secret.jpg"
    Image.new("RGB", (6, 4)).save(secret)
    image_id = str(secret) if image_id == "ABSOLUTE" else image_id
    with pytest.raises(ValueError, match="1 of the 1 images"):
        load(folder, [row(0, image_id=image_id)])


def test_a_few_pictures_that_do_not_decode_are_named_and_skipped_as_missing_ones_are(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = load(folder, list(map(row, range(10))))
    (path,) = {sample.image for sample in samples if sample.id.endswith("-3")}
    assert isinstance(path, Path)
    path.write_bytes(b"no picture")
    with caplog.at_level(logging.WARNING):
        decoded = mc2_file.decodable(samples, 10, left_out=(left_out := []))
    assert len(left_out) == 1
    assert [sample.id for sample in decoded] == [sample.id for sample in samples if sample.image != path]
    (record,) = caplog.records
    assert (
        f"1 of 10 images do not decode; their samples are skipped: The image of sample {3:012}-3" in record.getMessage()
    )
    assert len(mc2_file.decodable(samples, 3)) == 3  # behind which nothing is opened
    with pytest.raises(ValueError, match=r"1 of 4 images do not decode \(at most 10% may be broken\): .*-3 does"):
        mc2_file.decodable(samples[:4], 10)
