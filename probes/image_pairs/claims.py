"""The claims of answers: differences, by rules or as JSON, their number, and yes or no.

The rules know common English phrases for changes; a model that phrases them otherwise needs a judge. An answer is read
clause by clause, one claim per clause.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from probes.image_pairs.metrics import Claim

_PLACE = r"(?:.*?\b(?:at|from) the (?P<attribute>[a-z ]+))?"
PATTERNS = {
    "color": r"\b(?:changed (?:from|to)|changed(?: its)? colou?r|turned)\b(?:.*?\bto (?:the )?(?P<attribute>[a-z ]+))?",
    "position": r"\b(?:moved|changed(?: its)? (?:place|position))\b(?:.*?\bto (?:the )?(?P<attribute>[a-z ]+))?",
    "remove": rf"{_PLACE} ?(?:(?:was|were|is|are|has been) (?:removed|missing|gone)|is no longer|disappeared)",
    "add": r"(?:was|were|is|has been) added(?:.*?\bat the (?P<attribute>[a-z ]+))?",
}
"""Patterns for the clauses that state a difference of each type, and place or result as `attribute`."""

_CLAUSE = re.compile(r"(?<=[.!?;])\s+|\n+|,? and (?=(?:the|an?)\b)")
_DENIED = re.compile(r"\b(?:nothing|not|no(?!,| longer))\b|n't\b")
_UNSURE = re.compile(r"\b(?:may|might|maybe|perhaps|possibly|probably|seems?|appears? to|could)\b")


def claims(answer: str, categories: Sequence[str]) -> list[Claim]:
    """Return the differences that an answer claims, without denials and statements of no change.

    The category of a claim is the first of `categories` in its clause, also in the plural, and at the same place the longer
    one.
    """
    names = "|".join(re.escape(name) for name in sorted(categories, key=len, reverse=True))
    category_pattern = re.compile(rf"\b({names})(?:e?s)?\b") if categories else None
    claims_read = []
    for clause in _CLAUSE.split(answer.lower()):
        for kind, pattern in PATTERNS.items():
            match = re.search(pattern, clause)
            if match is not None and not _DENIED.search(clause):
                category = category_pattern.search(clause) if category_pattern else None
                attribute = (match.groupdict().get("attribute") or "").strip()
                claims_read.append(
                    Claim(kind, category[1] if category else None, attribute or None, not _UNSURE.search(clause))
                )
                break
    return claims_read


def read(answer: str, categories: Sequence[str]) -> list[Claim]:
    """Return the differences that an answer lists as JSON, otherwise those that its sentences claim."""
    listed = structured(answer)
    return claims(answer, categories) if listed is None else listed


def structured(answer: str) -> list[Claim] | None:
    """Return the claims of an answer that is JSON, or whose first fenced block is; None for any other.

    The JSON is a list of objects with `type` and `category`, or an object that holds one (`structured_output`,
    `differences`).
    """
    fenced = re.search(r"```(?:json)?\s*(.*?)```", answer, re.DOTALL)
    try:
        parsed = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return None
    if isinstance(parsed, dict):
        parsed = next((parsed[name] for name in ("structured_output", "differences") if name in parsed), None)
    if not isinstance(parsed, list) or not all(isinstance(entry, dict) for entry in parsed):
        return None
    return [difference(entry) for entry in parsed]


def difference(fields: dict[str, Any]) -> Claim:
    """Return a difference as the benchmark's files write it: `type`, `category`, and for colours `target_color`."""
    kind, category, attribute = (
        str(fields[name]).strip().lower() if fields.get(name) else None for name in ("type", "category", "target_color")
    )
    return Claim(kind, category, attribute)


_NUMBERS = {name: number for number, name in enumerate(("zero", "one", "two", "three", "four", "five", "six", "seven"))}
_COUNTED = re.compile(
    rf"(?<!\w)(\d+|{'|'.join(_NUMBERS)})(?!\w)(?= (?:\w+ ){{0,2}}(?:differences?|changes?)\b|\W*$)", re.IGNORECASE
)
_NONE = re.compile(
    r"\b(?:no|(?:not|\w+n't) (?:\w+ )?any) (?:\w+ )?(?:differences?|changes?)\b|^\W*none\b(?! of\b)|\bnone\W*$",
    re.IGNORECASE,
)


def counted(answer: str) -> int | None:
    """Return the number of differences that an answer states, 0 if it denies any, None if it states none.

    The number precedes "differences" or "changes", or is the whole or the end of the answer.
    """
    if _NONE.search(answer):
        return 0
    match = _COUNTED.search(answer)
    if match is None:
        return None
    word = match[1].lower()
    return _NUMBERS[word] if word in _NUMBERS else int(word)


def yes(answer: str) -> bool | None:
    """Return True for yes, False for no, None for neither."""
    word = re.match(r"\W*(yes|no)\b", answer.lower())
    return None if word is None else word[1] == "yes"
