"""Prompts word for word, answers read by hand, shares by hand, and the loader on a small file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from PIL import Image

from probes import mc2
from probes.mc2 import Sample, Shares

SAMPLE = Sample(
    id="1",
    task="color",
    image=Image.new("RGB", (8, 8), "red"),
    question="What color is the ball?",
    answer_vision="red",
    answer_text="blue",
    context="The ball is blue.",
)
ROW = {
    "image_id": "000000046962",
    "task": "color",
    "question": "What color is the ball?",
    "answer_vision": "red",
    "answer_text": "blue",
    "context": "The ball is blue.",
}


def test_plain_prompt_word_for_word() -> None:
    assert mc2.prompt(SAMPLE, "plain", swapped=False) == (
        "Text context: The ball is blue.\n"
        "What color is the ball?\n"
        "A. red\n"
        "B. blue\n"
        "Answer the question by selecting the correct answer A or B."
    )


def test_instruction_toward_text_word_for_word() -> None:
    assert mc2.prompt(SAMPLE, "text", swapped=True) == (
        "Text context: The ball is blue.\n"
        "In case there is an inconsistency between the text context and the image content, you should follow the text "
        "context rather than the image content.\n"
        "What color is the ball?\n"
        "A. blue\n"
        "B. red\n"
        "Answer the question by selecting the correct answer A or B."
    )


def test_instruction_toward_vision_swaps_what_to_follow() -> None:
    assert mc2.INSTRUCTIONS["vision"] == (
        "In case there is an inconsistency between the text context and the image content, you should follow the image "
        "content rather than the text context."
    )


def test_single_modality_leaves_the_other_out() -> None:
    image_only = mc2.messages(SAMPLE, "image_only", swapped=False)[0]["content"]
    context_only = mc2.messages(SAMPLE, "context_only", swapped=False)[0]["content"]
    assert [part["type"] for part in image_only] == ["image", "text"]
    assert "Text context" not in image_only[1]["text"]
    assert [part["type"] for part in context_only] == ["text"]
    assert context_only[0]["text"].startswith("Text context: The ball is blue.\n")


def test_a_sample_without_context_has_no_context_line() -> None:
    neutral = mc2.prompt(Sample("1", "t", SAMPLE.image, "Q?", "x", "y", ""), "plain", swapped=False)
    assert neutral.startswith("Q?\nA. x\n")


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("A", "A"),
        (" B\n", "B"),
        ("a", "A"),
        ("(B)", "B"),
        ("**A**", "A"),
        ("B.", "B"),
        ("A. red", "A"),
        ("B: blue", "B"),
        ("A) red, as the image shows", "A"),
        ("A - red", "A"),
        ("A\nThe ball is red.", "A"),
        ("A red", "A"),
        ("B blue", "B"),
        ("Answer: A", "A"),
        ("The correct answer is B.", "B"),
        ("The correct answer is B because the text says so.", "B"),
        ("the answer is (A) red", "A"),
        ("I would choose option B", "B"),
        ("It is red, so A.", "A"),
        ("The ball is red.", "A"),
        ("BLUE", "B"),
        ("", None),
        ("Sorry, I can't help with it.", None),
        ("A and B", None),
        ("A or B", None),
        ("The answer is A or the answer is B", None),
        ("The ball is red or blue.", None),
        ("A dog is in the image.", None),
        ("reddish", None),
        ("C", None),
    ],
)
def test_answers_read_by_hand(answer: str, chosen: str | None) -> None:
    assert mc2.letter(answer, ("red", "blue")) == chosen


def test_an_option_inside_the_other_is_not_taken_for_it() -> None:
    assert mc2.letter("It is light blue.", ("light blue", "blue")) == "A"
    assert mc2.letter("It is blue.", ("light blue", "blue")) == "B"


@pytest.mark.parametrize(
    ("first", "second", "category"),
    [
        ("A", "B", "vision"),
        ("B", "A", "text"),
        ("A", "A", "others"),
        ("B", "B", "others"),
        ("A", None, "others"),
        (None, None, "others"),
    ],
)
def test_only_consistent_answers_count(first: str | None, second: str | None, category: str) -> None:
    assert mc2.outcome(first, second) == category


def test_shares_by_hand() -> None:
    shares = Shares.of(["vision", "vision", "vision", "text", "others"])
    assert shares == Shares(0.6, 0.2, 0.2, 0.75, 5)
    assert shares.to_json() == {"s_vision": 0.6, "s_text": 0.2, "s_others": 0.2, "vision_ratio": 0.75, "n": 5}


def test_the_ratio_is_null_where_no_answer_follows_a_modality() -> None:
    assert Shares.of(["others", "others"]).to_json()["vision_ratio"] is None
    assert Shares.of([]) == Shares(0.0, 0.0, 0.0, None, 0)


def test_the_interval_holds_the_ratio_and_is_seeded() -> None:
    outcomes: list[mc2.Outcome] = ["vision"] * 30 + ["text"] * 10
    shares = Shares.of(outcomes, resamples=200, seed=3)
    assert shares.interval is not None
    assert shares.interval[0] < 0.75 < shares.interval[1]
    assert shares == Shares.of(outcomes, resamples=200, seed=3)
    assert shares.to_json()["vision_ratio_95"] == list(shares.interval)


# -------------------------------------------------------------------------------------------------------- loading


def _write(folder: Path, rows: object) -> Path:
    path = folder / "mc2.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize(
    "file",
    [
        "train2014/COCO_train2014_000000046962.jpg",
        "val2014/COCO_val2014_000000046962.jpg",
        "COCO_val2014_000000046962.jpg",
        "000000046962.jpg",
    ],
)
def test_coco_names_are_resolved(tmp_path: Path, file: str) -> None:
    image = tmp_path / file
    image.parent.mkdir(exist_ok=True)
    Image.new("L", (6, 4), 200).save(image)
    (sample,) = mc2.load(_write(tmp_path, [ROW]), tmp_path)
    assert sample.image == image
    assert (sample.picture().size, sample.picture().mode) == ((6, 4), "RGB")
    assert (sample.task, sample.answer_vision, sample.answer_text) == ("color", "red", "blue")


def test_missing_images_are_named_and_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "000000046962.jpg")
    with caplog.at_level(logging.WARNING):
        samples = mc2.load(_write(tmp_path, [ROW, ROW | {"image_id": "000000000007"}]), tmp_path)
    assert len(samples) == 1
    assert "1 of 2 images" in caplog.text
    assert "000000000007" in caplog.text


def test_no_image_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"None of the 1 images .* expected COCO 2014"):
        mc2.load(_write(tmp_path, [ROW]), tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {key: value for key, value in ROW.items() if key != "question"},
            "row 1: 'question' must be a non-empty string",
        ),
        (ROW | {"context": "  "}, "row 1: 'context' must be a non-empty string"),
        (ROW | {"answer_text": 3}, "row 1: 'answer_text' must be a non-empty string, got 3"),
        (ROW | {"answer_text": "Red"}, "row 1: both answers are 'Red'"),
        (["not", "an", "object"], "row 1: must be an object, not list"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mc2.load(_write(tmp_path, [ROW, row]), tmp_path)


def test_a_file_that_is_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a list of samples, not dict"):
        mc2.load(_write(tmp_path, {"a": 1}), tmp_path)


def test_an_image_id_cannot_leave_the_folder(tmp_path: Path) -> None:
    Image.new("RGB", (6, 4)).save(tmp_path / "secret.jpg")
    folder = tmp_path / "coco"
    folder.mkdir()
    with pytest.raises(ValueError, match="None of the 1 images"):
        mc2.load(_write(tmp_path, [ROW | {"image_id": "../secret.jpg"}]), folder)
