"""Rows in the published formats become samples; wrong ones are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.ambigcaps import task as ambigcaps
from probes.chair import file as chair
from probes.harness.missing import Incomplete, leave_out
from probes.image_qa import pope
from probes.image_qa.rows import image
from probes.mme import file as mme
from probes.phd import task as phd
from probes.phd.samples import PhdSample
from probes.tallyqa import task as tallyqa
from probes.tallyqa.task import Counted
from probes.vsr import task as vsr


def draw(*places: Path) -> None:
    for place in places:
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (56, 56), "red").save(place)


def write(place: Path, text: str) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    return place


def test_mme_is_read_as_it_is_published_and_as_its_script_takes_it(tmp_path: Path) -> None:
    draw(tmp_path / "count/000.jpg", tmp_path / "OCR/images/1.png")
    two = "Are there two stars? Please answer yes or no.\tYes\nIs there one? Please answer yes or no.\tNo\n"
    write(tmp_path / "count/000.txt", two)
    write(tmp_path / "OCR/questions_answers_YN/1.txt", two)
    pairs = mme.load([tmp_path], tmp_path)
    assert {(pair.subtask, pair.picture) for pair in pairs} == {
        ("count", tmp_path / "count/000.jpg"),
        ("OCR", tmp_path / "OCR/images/1.png"),
    }
    assert pairs[0].questions == (
        ("Are there two stars? Please answer yes or no.", True),
        ("Is there one? Please answer yes or no.", False),
    )
    script = write(tmp_path / "count.txt", "".join(f"000.jpg\t{line}\n" for line in two.splitlines()))
    (again,) = mme.load([script], tmp_path)
    assert again in pairs


def test_chair_takes_objects_of_instances_and_of_captions(tmp_path: Path) -> None:
    draw(tmp_path / "COCO_val2014_7.jpg")
    images = [{"id": 7, "file_name": "COCO_val2014_7.jpg"}, {"id": 8, "file_name": "elsewhere.jpg"}]
    categories = [{"id": 1, "name": "dog"}, {"id": 2, "name": "dining table"}]
    instances = {"images": images, "categories": categories, "annotations": [{"image_id": 7, "category_id": 2}]}
    captions = {"images": images, "annotations": [{"image_id": 7, "caption": "Two puppies on a couch."}]}
    files = [write(tmp_path / "i.json", json.dumps(instances)), write(tmp_path / "c.json", json.dumps(captions))]
    (described,) = chair.load(files, tmp_path)
    assert described.objects == {"dining table", "couch", "dog"}
    with pytest.raises(ValueError, match="holds none of the 2 images"):
        chair.load(files, tmp_path / "none")
    with pytest.raises(ValueError, match="needs COCO's instances"):
        chair.load(files[1:], tmp_path)
    for text, why in (
        ("3", "its parts are not of the types"),
        ("{}", "it lacks 'images'"),
        ("{", "Expecting property"),
    ):
        with pytest.raises(ValueError, match=rf"odd\.json is not a file of COCO annotations: {why}"):
            chair.load([write(tmp_path / "odd.json", text)], tmp_path)
    synonyms = write(tmp_path / "synonyms.txt", "dog, puppy\ndining table, table\n")
    (with_synonyms,) = chair.load([*files, synonyms], tmp_path)
    assert with_synonyms.objects == {"dining table", "dog"}


def test_phd_asks_each_question_plainly_and_beside_both_texts(tmp_path: Path) -> None:
    image = tmp_path / "val2014/COCO_val2014_000000000139.jpg"
    draw(image, tmp_path / "CCS_images/0.png")
    row = {"image_id": "139", "task": "counting", "yes_question": "Two?", "no_question": "Three?"}
    rows = [row | {"context": {"iac": "A.", "icc": "B."}}, row | {"image_id": "0", "ccs_description": "odd"}]
    samples = phd.load([write(tmp_path / "data.json", json.dumps(rows))], tmp_path)
    assert len(samples) == 3 * 2 + 2
    assert PhdSample(image, "Three?", False, "counting", "base") in samples
    assert PhdSample(image, "B.\nTwo?", True, "counting", "icc") in samples


def test_tallyqa_and_vsr(tmp_path: Path) -> None:
    draw(tmp_path / "VG_100K_2/1.jpg", tmp_path / "2.jpg")
    row: dict[str, Any] = {
        "answer": 4,
        "image": "VG_100K_2/1.jpg",
        "issimple": False,
        "question": "How many headlights?",
    }
    counted = tallyqa.load([write(tmp_path / "test.json", json.dumps([row]))], tmp_path)
    assert counted == [Counted(tmp_path / "VG_100K_2/1.jpg", "How many headlights?", 4, False)]
    line = {"image": "2.jpg", "caption": "The cat is behind the laptop.", "label": 0, "relation": "behind"}
    (stated,) = vsr.load([write(tmp_path / "test.jsonl", json.dumps(line) + "\n")], tmp_path)
    assert (stated.present, stated.setting) == (False, "behind")
    assert '"The cat is behind the laptop."' in stated.question


def test_ambigcaps_is_rows_or_three_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.ambigcaps.task.check_bleu", lambda: None)
    draw(tmp_path / "1.jpg")
    rows = write(tmp_path / "rows.json", json.dumps([{"image": "1.jpg", "en": "a bat", "tr": "bir yarasa"}]))
    files = [write(tmp_path / name, text) for name, text in (("t.en", "a bat\n"), ("t.tr", "bir yarasa\n"))]
    names = write(tmp_path / "t.txt", "1.jpg\n")
    forth, back = ambigcaps.load([rows], tmp_path)
    assert [forth, back] == ambigcaps.load([*files, names], tmp_path)
    assert (back.text, back.reference, back.target) == ("bir yarasa", "a bat", "English")
    write(tmp_path / "t.tr", "bir\nyarasa\n")
    with pytest.raises(ValueError, match=r"as many lines in each file; .*t\.tr has 2"):
        ambigcaps.load([*files, names], tmp_path)
    with pytest.raises(ValueError, match=r"needs NAME\.en, NAME\.tr"):
        ambigcaps.load(files[:1], tmp_path)


@pytest.mark.parametrize(
    ("load", "name", "text", "message"),
    [
        (mme.load, "count/0.txt", "Two?\tYes\n", "two questions on each image; on 0 there are 1"),
        (mme.load, "count/0.txt", "Two? Yes\n", "line 1: not a question of MME"),
        (mme.load, "count/0.txt", "Two?\tYes\nOne?\tNo\n", "there is no image"),
        (phd.load, "data.json", '[{"image_id": "1"}]', "row 1: it has no 'task'"),
        (tallyqa.load, "test.json", "[3]", "row 1: it is not an object"),
        (vsr.load, "t.jsonl", "{\n", "line 1: not JSON"),
        (
            vsr.load,
            "t.jsonl",
            '{"image": "2.jpg", "caption": "", "label": 0, "relation": ""}',
            "row 1: there is no image",
        ),
        (chair.load, "i.json", '{"images": [], "categories": [{"id": 1, "name": "wug"}]}', "lack the category wug"),
    ],
)
def test_invalid_rows_are_named(load: Callable[..., Any], name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load([write(tmp_path / name, text)], tmp_path)


def test_incomplete_rows_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw(tmp_path / "1.jpg")
    good = {"image": "1.jpg", "text": "Is there a star?", "label": "yes"}
    for bad, message in (
        (good | {"image": "2.jpg"}, "there is no image"),
        ({"image": "1.jpg", "label": "no"}, "it has no 'text'"),
        (good | {"text": ""}, "it has no 'text'"),
        (good | {"label": None}, "it has no answer"),
    ):
        file = write(tmp_path / "coco_pope_random.json", json.dumps([good, bad, good]))
        left_out: list[str] = []
        assert [sample.id for sample in pope.load([file], tmp_path, left_out)] == ["1-0", "1-2"]
        (why,) = left_out
        assert message in why
        assert f"{file}, row 2: " in caplog.messages[-1]
    write(file, json.dumps([good, bad, bad, *[good] * 9]))
    with pytest.raises(ValueError, match="2 of 12 samples cannot be asked"):
        pope.load([file], tmp_path)
    write(file, json.dumps([good, good | {"text": 3}, good]))
    with pytest.raises(ValueError, match="row 2: 'text' must be a string; got 3"):
        pope.load([file], tmp_path)


def test_an_image_of_mme_that_lacks_a_question_is_left_out(tmp_path: Path) -> None:
    draw(*(tmp_path / f"count/{number}.jpg" for number in range(4)))
    for number in range(4):
        write(tmp_path / f"count/{number}.txt", "Two?\tYes\nOne?" + "\tNo\n" * (number != 2))
    left_out: list[str] = []
    pairs = mme.load([tmp_path], tmp_path, left_out)
    assert [(pair.id, pair.expected) for pair in pairs] == [(f"count/{number}", ["yes", "no"]) for number in (0, 1, 3)]
    assert left_out == [f"{tmp_path / 'count/2.txt'}: line 2: not a question of MME: a line is QUESTION TAB ANSWER"]


def test_fields_that_are_not_texts_are_named(tmp_path: Path) -> None:
    (tmp_path / "i.json").write_bytes(b"\xff\xfe")
    for load in (mme.load, tallyqa.load, chair.load):
        with pytest.raises(ValueError, match=r"i\.json is not UTF-8 text"):
            load([tmp_path / "i.json"], tmp_path)
    with pytest.raises(ValueError, match="is a folder; a file is needed"):
        chair.load([tmp_path], tmp_path)
    row = {"image": "1.jpg", "question": "How many?", "answer": "many", "issimple": True}
    draw(tmp_path / "1.jpg")
    with pytest.raises(ValueError, match="row 1: its answer must be a whole number; got 'many'"):
        tallyqa.load([write(tmp_path / "t.json", json.dumps([row]))], tmp_path)


def test_an_impossible_file_name_is_a_missing_image(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Incomplete) as raised:
        image(tmp_path, "x" * 5000)
    leave_out([str(raised.value)], of=20)
    (message,) = caplog.messages
    assert message.startswith(f"1 of 20 samples are left out: there is no image {tmp_path}")
    assert len(message) < 400
