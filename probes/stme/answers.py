"""Matching of answers, by the rules of the authors' scripts and by rules that read more kinds of answers.

Both are lenient: they look for the right answer in the text. `published` is the authors' `evaluate.py`, which is
MileBench's, with its quirks: in a caption's answer only "image N" counts (or a number of two digits at least), and an option
counts wherever its text occurs, the first in the answer.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Literal

from probes.answering.letters import letter
from probes.stme.samples import ANCHOR, CAPTION, NEEDLE, TargetSample

Scoring = Literal["published", "robust"]

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_PICTURE = re.compile(
    rf"\b(?:image|picture)s?\s*#?\s*(\d+)|\b({'|'.join(ORDINALS)})\s+(?:image|picture)", re.IGNORECASE
)
_CONCLUSION = re.compile(r"(?:answer(?: is|:)|therefore,?|thus,?|hence,?)\s", re.IGNORECASE)
_DIGITS = re.compile(r"(?<!image )(?<!picture )(?<!image)(?<!\d)\d+", re.IGNORECASE)
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def right(sample: TargetSample, answer: str, scoring: Scoring) -> bool:
    """Return whether the answer is right."""
    return RULES[scoring](sample, answer)


def _published(sample: TargetSample, answer: str) -> bool:
    if sample.task == CAPTION:
        return _published_number(answer) == int(sample.response)
    processed, expected = _process(answer), _process(sample.response)
    if sample.choices:
        return _published_choice(processed, [_process(choice) for choice in sample.choices]) == expected
    return expected in processed.split() if sample.task == NEEDLE else expected in processed


def _published_number(answer: str) -> int | None:
    answer = answer.lower()
    if "no match" in answer:
        return None
    if match := re.search(r"image\s+(\d+)", answer):
        return int(match[1])
    match = re.search(r"-?\d+\.?\d+", answer)
    return int(float(match[0])) if match else None


def _process(text: str) -> str:
    """Return the text without the punctuation that the script strips."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    for mark in _PUNCTUATION:
        joined = mark + " " in text or " " + mark in text or re.search(r"\d,\d", text)
        text = text.replace(mark, "" if joined else " ")
    return re.sub(r"\.(?!\d)", "", text).strip("'\" ").lower()


def _published_choice(processed: str, options: list[str]) -> str | None:
    """Return the text of the chosen option.

    It is that of the first "letter text" in the answer, or the first text, or the only character of the answer that is an
    option's letter; the third option for an empty answer.
    """
    letters = dict(zip(string.ascii_lowercase, options, strict=False))
    forms = "|".join(re.escape(_process(f"{letter} {option}")) for letter, option in letters.items())
    if match := re.search(forms, processed):
        return letters.get(match[0][0])
    squeezed = {option.replace(" ", ""): option for option in reversed(options)}
    if match := re.search(
        "|".join(re.escape(option.replace(" ", "")) for option in options), processed.replace(" ", "")
    ):
        return squeezed[match[0]]
    lettered = [letter for letter in processed or "c" if letter in letters]
    return letters[lettered[0]] if len(lettered) == 1 else None


def _robust(sample: TargetSample, answer: str) -> bool:
    if sample.task in (CAPTION, ANCHOR) and not sample.choices:
        return picture_named(answer) == sample.target
    if sample.choices:
        chosen = letter(answer, sample.choices)
        return chosen is not None and sample.choices[string.ascii_uppercase.index(chosen)] == sample.response
    text = _PICTURE.sub(" ", answer) if sample.task == NEEDLE else answer  # a picture's number is no needle
    return bool(re.search(rf"(?<!\w){re.escape(sample.response.strip(' .'))}(?!\w)", text, re.IGNORECASE))


def picture_named(answer: str) -> int | None:
    """Return the number of the picture that an answer names: the first one behind its conclusion, if it has one."""
    *_, last = _CONCLUSION.split(answer)
    for text in (last, answer):
        if match := _PICTURE.search(text):
            return int(match[1]) if match[1] else ORDINALS.index(match[2].lower()) + 1
        if match := re.fullmatch(r"\W*(\d+)\W*", text):
            return int(match[1])
    return None


RULES: Mapping[Scoring, Callable[[TargetSample, str], bool]] = {"published": _published, "robust": _robust}


def names_target(sample: TargetSample, answer: str, scoring: Scoring) -> bool:
    """Return whether an answer to `which` names the target.

    By the authors' script its digits may occur anywhere; otherwise it must be the only picture that is named.
    """
    if scoring == "published":
        return str(sample.target) in answer
    numbers = {int(number) for number in re.findall(r"\d+", answer)}
    return numbers == {sample.target}


def reads_digits(sample: TargetSample, answer: str) -> bool:
    """Return whether the answer to a needle's question holds digits other than a picture's number.

    Then something was read from a picture (appendix C.3).
    """
    return sample.task == NEEDLE and bool(_DIGITS.search(answer))
