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
    said, wanted = _processed(answer), _processed(sample.response)
    if sample.choices:
        return _published_choice(said, [_processed(one) for one in sample.choices]) == wanted
    return wanted in said.split() if sample.task == NEEDLE else wanted in said


def _published_number(answer: str) -> int | None:
    answer = answer.lower()
    if "no match" in answer:
        return None
    if found := re.search(r"image\s+(\d+)", answer):
        return int(found[1])
    found = re.search(r"-?\d+\.?\d+", answer)
    return int(float(found[0])) if found else None


def _processed(text: str) -> str:
    """Return the text without the punctuation that the script strips."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    for mark in _PUNCTUATION:
        joined = mark + " " in text or " " + mark in text or re.search(r"\d,\d", text)
        text = text.replace(mark, "" if joined else " ")
    return re.sub(r"\.(?!\d)", "", text).strip("'\" ").lower()


def _published_choice(said: str, options: list[str]) -> str | None:
    """Return the text of the chosen option.

    It is that of the first "letter text" in the answer, or the first text, or the only character of the answer that is an
    option's letter; the third option for an empty answer.
    """
    letters = dict(zip(string.ascii_lowercase, options, strict=False))
    forms = "|".join(re.escape(_processed(f"{letter} {option}")) for letter, option in letters.items())
    if found := re.search(forms, said):
        return letters.get(found[0][0])
    squeezed = {option.replace(" ", ""): option for option in reversed(options)}
    if found := re.search("|".join(re.escape(one.replace(" ", "")) for one in options), said.replace(" ", "")):
        return squeezed[found[0]]
    lettered = [one for one in said or "c" if one in letters]
    return letters[lettered[0]] if len(lettered) == 1 else None


def _robust(sample: TargetSample, answer: str) -> bool:
    if sample.task in (CAPTION, ANCHOR) and not sample.choices:
        return picture_named(answer) == sample.target
    if sample.choices:
        chosen = letter(answer, sample.choices)
        return chosen is not None and sample.choices[string.ascii_uppercase.index(chosen)] == sample.response
    said = _PICTURE.sub(" ", answer) if sample.task == NEEDLE else answer  # a picture's number is no needle
    return bool(re.search(rf"(?<!\w){re.escape(sample.response.strip(' .'))}(?!\w)", said, re.IGNORECASE))


def picture_named(answer: str) -> int | None:
    """Return the number of the picture that an answer names: the first one behind its conclusion, if it has one."""
    *_, last = _CONCLUSION.split(answer)
    for text in (last, answer):
        if found := _PICTURE.search(text):
            return int(found[1]) if found[1] else ORDINALS.index(found[2].lower()) + 1
        if found := re.fullmatch(r"\W*(\d+)\W*", text):
            return int(found[1])
    return None


RULES: Mapping[Scoring, Callable[[TargetSample, str], bool]] = {"published": _published, "robust": _robust}


def names_target(sample: TargetSample, answer: str, scoring: Scoring) -> bool:
    """Return whether an answer to `which` names the target.

    By the authors' script its digits may occur anywhere; otherwise it must be the only picture that is named.
    """
    if scoring == "published":
        return str(sample.target) in answer
    numbers = {int(one) for one in re.findall(r"\d+", answer)}
    return numbers == {sample.target}


def reads_digits(sample: TargetSample, answer: str) -> bool:
    """Return whether the answer to a needle's question holds digits other than a picture's number.

    Then something was read from a picture (appendix C.3).
    """
    return sample.task == NEEDLE and bool(_DIGITS.search(answer))
