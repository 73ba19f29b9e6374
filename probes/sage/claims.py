"""What free answers claim, read off by rules: differences, and yes or no.

The rules know ways of saying that something changed in English; a model that says it in others needs a judge. An answer is
read clause by clause, one claim a clause.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from probes.sage.differences import Claim

_PLACE = r"(?:.*?\b(?:at|from) the (?P<attribute>[a-z ]+))?"
PATTERNS = {
    "color": r"\b(?:changed (?:from|to)|changed(?: its)? colou?r|turned)\b(?:.*?\bto (?:the )?(?P<attribute>[a-z ]+))?",
    "position": r"\b(?:moved|changed(?: its)? (?:place|position))\b(?:.*?\bto (?:the )?(?P<attribute>[a-z ]+))?",
    "remove": rf"{_PLACE} ?(?:(?:was|were|is|are|has been) (?:removed|missing|gone)|is no longer|disappeared)",
    "add": r"(?:was|were|is|has been) added(?:.*?\bat the (?P<attribute>[a-z ]+))?",
}
"""How a clause says a difference of a type, and where, what it became."""

_CLAUSE = re.compile(r"(?<=[.!?;])\s+|\n+|,? and (?=(?:the|an?)\b)")
_DENIED = re.compile(r"\b(?:nothing|not|no(?!,| longer))\b|n't\b")
_UNSURE = re.compile(r"\b(?:may|might|maybe|perhaps|possibly|probably|seems?|appears? to|could)\b")


def claims(answer: str, categories: Sequence[str]) -> list[Claim]:
    """The differences that an answer claims; what it denies, or says of no change, is none. The category of a claim is the
    first of `categories` in its clause, also in the plural, and of two at one place the longer."""
    names = "|".join(re.escape(name) for name in sorted(categories, key=len, reverse=True))
    named = re.compile(rf"\b({names})(?:e?s)?\b") if categories else None
    found = []
    for clause in _CLAUSE.split(answer.lower()):
        for kind, pattern in PATTERNS.items():
            match = re.search(pattern, clause)
            if match is not None and not _DENIED.search(clause):
                what = named.search(clause) if named else None
                attribute = (match.groupdict().get("attribute") or "").strip()
                found.append(Claim(kind, what[1] if what else None, attribute or None, not _UNSURE.search(clause)))
                break
    return found


def yes(answer: str) -> bool | None:
    """True for yes, False for no, None for neither."""
    word = re.match(r"\W*(yes|no)\b", answer.lower())
    return None if word is None else word[1] == "yes"
