"""The scoring of answers, compared with cases worked by hand."""

from __future__ import annotations

import pytest
from PIL import Image

from probes.stme.answers import names_target, picture_named, reads_digits, right
from probes.stme.samples import ANCHOR, CAPTION, NEEDLE, TargetSample

PICTURES = tuple(Image.new("RGB", (8, 8)) for _ in range(4))


def sample(task: str, response: str, choices: tuple[str, ...] = (), target: int = 2) -> TargetSample:
    return TargetSample("1", task, ("",) * 4 + ("What?",), PICTURES[:4], target, response, choices)


CHOICES = ("light blue", "blue", "red, green")


@pytest.mark.parametrize(
    ("target_sample", "answer", "published", "robust"),
    [
        # A caption: the authors read "image N", else a number of two digits, so that "2" and "Picture 2" are none.
        (sample(CAPTION, "2"), "The caption is of Image 2, not of image 3.", True, True),
        (sample(CAPTION, "2"), "image 3 shows a dog, so the answer is image 2", False, True),
        (sample(CAPTION, "2"), "2", False, True),
        (sample(CAPTION, "2"), "Picture 2.", False, True),
        (sample(CAPTION, "2"), "The second picture.", False, True),
        (sample(CAPTION, "2"), "No match: image 2 comes closest", False, True),
        (sample(CAPTION, "2"), "I cannot see any.", False, False),
        # A needle: a word of its own.
        (sample(NEEDLE, "4711"), "The code is 4711.", True, True),
        (sample(NEEDLE, "4711"), "It says 47112", False, False),
        (sample(NEEDLE, "2"), "Picture 2.", True, False),
        # Options: the text wherever it stands, the first in the answer; or the letter.
        (sample("TQA", "blue", CHOICES), "It is blue.", True, True),
        (sample("TQA", "blue", CHOICES), "B", True, True),
        (sample("TQA", "blue", CHOICES), "B. blue", True, True),
        (sample("TQA", "blue", CHOICES), "(B), because of the sky", False, True),
        (sample("TQA", "blue", CHOICES), "Light blue", False, False),
        (sample("TQA", "blue", CHOICES), "bluetooth", True, False),
        (sample("TQA", "red, green", CHOICES), "Red, green.", True, True),
        (sample("TQA", "red, green", CHOICES), "", True, False),  # the script takes silence for the third option
        (sample("TQA", "blue", CHOICES), "It may be A. The answer is B.", False, True),
        # An open question: the words, as they are.
        (sample("facts", "The star is red."), "the star is red", True, True),
        (sample("facts", "The star is red."), "The star is reddish.", True, False),
        (sample(ANCHOR, "2"), "Picture 2.", True, True),
    ],
)
def test_answers_by_both_rules(target_sample: TargetSample, answer: str, published: bool, robust: bool) -> None:
    assert (right(target_sample, answer, "published"), right(target_sample, answer, "robust")) == (published, robust)


def test_the_picture_that_an_answer_names() -> None:
    named = {
        "Picture 3.": 3,
        "3": 3,
        "image #12 and 4": 12,
        "the first picture": 1,
        "There are 2 stars.": None,
        "": None,
    }
    assert {answer: picture_named(answer) for answer in named} == named


def test_a_list_of_pictures_names_the_target() -> None:
    target_sample = sample("TQA", "blue", CHOICES)
    answers = {"[2]": (True, True), "[2, 3]": (True, False), "[12]": (True, False), "none": (False, False)}
    verdicts = {
        answer: tuple(names_target(target_sample, answer, rule) for rule in ("published", "robust"))
        for answer in answers
    }
    assert verdicts == answers


def test_other_digits_are_read_off_a_needles_picture() -> None:
    needle = sample(NEEDLE, "4711")
    answers = {
        "The code is 4171.": True,
        "It is in image 3": False,
        "Picture 2.": False,
        "image 2 says 47": True,
        "?": False,
    }
    assert {answer: reads_digits(needle, answer) for answer in answers} == answers
    assert not reads_digits(sample("TQA", "blue", CHOICES), "4711")
