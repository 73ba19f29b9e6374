"""Parsing of the option that an answer chooses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_uppercase


@dataclass(frozen=True)
class _Forms:
    """The patterns in which an answer names an option's letter."""

    leading: re.Pattern[str]
    called: re.Pattern[str]
    set_off: re.Pattern[str]
    stated: re.Pattern[str]
    joined: re.Pattern[str]


@lru_cache
def _forms(letters: str) -> _Forms:
    either, capital = f"[{letters}{letters.lower()}]", f"[{letters}]"
    marked = rf"[*_\"'`(\[]*(?:(?i:option)\s+)?({capital})\b"
    return _Forms(
        leading=re.compile(rf"[\s*_\"'`(\[]*({either})(?=[\s*_\"'`]*(?:$|[.:;,)\]])|\n|\s+-)"),
        called=re.compile(rf"\b(?i:answer|option|choice)(?:\s+(?i:is|would be|should be))?\s*[:=]?\s*{marked}"),
        set_off=re.compile(rf"(?<!\w)\(?({capital})(?:\)|\.(?=\s|$)|:(?=\s))"),
        stated=re.compile(rf"\b(?i:answer\s+is)\s*:?\s*{marked}"),
        joined=re.compile(rf"(?<!\w)\(?({capital})\)?,?\s*(?:\band\b|\bor\b|&|/)\s*\(?({capital})(?!\w)"),
    )


def letter(answer: str, options: Sequence[str]) -> str | None:
    """Return the letter of the option that an answer chooses ("A", "B", ...), or None if it names none or several.

    Only the conclusion of a chain of thought is read (see `_conclusion`), in this order: a closing "The answer is B" of a
    text that weighs several options; a leading letter ("B", "(B)", "B. four", "**B**"); a letter that is called the answer
    ("The correct answer is B", "Answer: B"); a letter set off as an option ("... so B)"); the text of exactly one option.
    """
    letters = ascii_uppercase[: len(options)]
    forms = _forms(letters)
    text = _conclusion(answer).strip()
    if closing := _closing(text, options, forms):
        return closing
    if match := forms.leading.match(text):
        return match[1].upper()
    for name, option in zip(letters, options, strict=True):  # "A red" is a choice, in "A dog" A is an article
        if re.match(rf"{name}\s+{re.escape(option)}(?!\w)", text, re.IGNORECASE):
            return name
    for pattern in (forms.called, forms.set_off):
        places = {match.start(1): match[1] for match in pattern.finditer(text)}
        chosen = {*places.values()}
        for pair in forms.joined.finditer(text):  # "both A and C." sets off only C but chooses two
            if {pair.start(1), pair.start(2)} & places.keys():
                chosen.update(pair.groups())
        if chosen:
            return chosen.pop() if len(chosen) == 1 else None
    return _option_in(text, options)


def _conclusion(answer: str) -> str:
    """Return the content of the last <answer>, closed or cut off.

    The authors' released script does not define the answer where there is no such tag. Here it is the text after the
    thoughts, empty if they do not end, or the whole answer if it has no tags.
    """
    *before, last = re.split("(?i)<answer>", answer)
    if before:
        return re.split("(?i)</answer>", last)[0]
    *before, last = re.split("(?i)</think>", answer)
    return "" if not before and re.search("(?i)<think>", answer) else last


def _closing(text: str, options: Sequence[str], forms: _Forms) -> str | None:
    """Return the letter of the answer's closing statement, which the text of its option may follow.

    A sentence that states two letters states none.
    """
    stated = list(forms.stated.finditer(text))
    if not stated:
        return None
    chosen = stated[-1][1]
    following = re.sub(r"^\W+|\W+$", "", text[stated[-1].end() :])
    option = re.sub(r"^\W+|\W+$", "", options[ascii_uppercase.index(chosen)])
    if following and following.lower() != option.lower():
        return None
    in_one_sentence = len(stated) > 1 and not re.search(r"[.!?\n]", text[stated[-2].end() : stated[-1].start()])
    return None if in_one_sentence and stated[-2][1] != chosen else chosen


def _option_in(text: str, options: Sequence[str]) -> str | None:
    """Return the only option with its text in the answer; longer options are blanked first ("light blue" before "blue")."""
    remaining, letters = text, []
    for index in sorted(range(len(options)), key=lambda i: -len(options[i])):
        pattern = re.compile(rf"(?<!\w){re.escape(options[index].strip())}(?!\w)", re.IGNORECASE)
        if pattern.search(remaining):
            letters.append(ascii_uppercase[index])
            remaining = pattern.sub(" ", remaining)
    return letters[0] if len(letters) == 1 else None
