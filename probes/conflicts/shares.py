"""How answers to conflicts are scored (modality-preference paper, section 3): the option that is chosen, and three shares.

A sample counts for a modality only if the answers in both orders of its options follow it; anything else, also an answer
that names no option, is "others".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from probes.conflicts.samples import LETTERS, Side
from probes.harness.bootstrap import wilson

Outcome = Literal["vision", "text", "others"]

_LEADING = re.compile(r"[\s*_\"'`(\[]*([ABab])(?=[\s*_\"'`]*(?:$|[.:;,)\]])|\n|\s+-)")
_CALLED = re.compile(
    r"\b(?i:answer|option|choice)(?:\s+(?i:is|would be|should be))?\s*[:=]?\s*[*_\"'`(\[]*(?:(?i:option)\s+)?([AB])\b"
)
_STATED = re.compile(r"\b(?i:answer\s+is)\s*:?\s*[*_\"'`(\[]*(?:(?i:option)\s+)?([AB])\b")
_SET_OFF = re.compile(r"(?<!\w)\(?([AB])(?:\)|\.(?=\s|$)|:(?=\s))")


def letter(answer: str, options: Sequence[str]) -> str | None:
    """Which option an answer chooses: "A", "B", or None where it names none or both.

    Of a chain of thought only the conclusion is read (see `_conclusion`), in this order: a closing "The answer is B" of a
    text that weighs both options; a leading letter ("B", "(B)", "B. four", "**B**"), a letter that is called the answer
    ("The correct answer is B", "Answer: B"), a letter set off as an option ("... so B)"), the text of exactly one option.
    """
    text = _conclusion(answer).strip()
    if closing := _closing(text, options):
        return closing
    if found := _LEADING.match(text):
        return found[1].upper()
    for name, option in zip(LETTERS, options, strict=True):  # "A red" is a choice, "A dog" an article
        if re.match(rf"{name}\s+{re.escape(option)}(?!\w)", text, re.IGNORECASE):
            return name
    for pattern in (_CALLED, _SET_OFF):
        letters = {match.upper() for match in pattern.findall(text)}
        if letters:
            return letters.pop() if len(letters) == 1 else None
    return _option_in(text, options)


def _conclusion(answer: str) -> str:
    """What the last <answer> holds, closed or cut off. The authors' released script does not say what an answer without one
    is: here it is what follows the thoughts, nothing where they do not end, all of an answer that has no tags."""
    *before, last = re.split("(?i)<answer>", answer)
    if before:
        return re.split("(?i)</answer>", last)[0]
    *before, last = re.split("(?i)</think>", answer)
    return "" if not before and re.search("(?i)<think>", answer) else last


def _closing(text: str, options: Sequence[str]) -> str | None:
    """The letter of the statement that the answer ends with, its option's text perhaps behind it; a sentence that states
    both letters states none."""
    stated = list(_STATED.finditer(text))
    if not stated:
        return None
    chosen = stated[-1][1]
    rest = re.sub(r"^\W+|\W+$", "", text[stated[-1].end() :])
    option = re.sub(r"^\W+|\W+$", "", options[LETTERS.index(chosen)])
    if rest and rest.lower() != option.lower():
        return None
    in_one_sentence = len(stated) > 1 and not re.search(r"[.!?\n]", text[stated[-2].end() : stated[-1].start()])
    return None if in_one_sentence and stated[-2][1] != chosen else chosen


def _option_in(text: str, options: Sequence[str]) -> str | None:
    """The one option whose text occurs in the answer; the longer option is blanked first ("light blue" before "blue")."""
    rest, found = text, []
    for index in sorted(range(len(options)), key=lambda i: -len(options[i])):
        pattern = re.compile(rf"(?<!\w){re.escape(options[index].strip())}(?!\w)", re.IGNORECASE)
        if pattern.search(rest):
            found.append(LETTERS[index])
            rest = pattern.sub(" ", rest)
    return found[0] if len(found) == 1 else None


def outcome(first: str | None, second: str | None) -> Outcome:
    """The category of a sample from the letters chosen in the unswapped and in the swapped order."""
    if (first, second) == ("A", "B"):
        return "vision"
    return "text" if (first, second) == ("B", "A") else "others"


@dataclass(frozen=True)
class Shares:
    """S_v, S_t, S_o as shares of all samples, and Vision Ratio = S_v / (S_v + S_t), None where neither occurs.

    `intervals`: Wilson's 95 % intervals by field, where they were asked for; that of the ratio is of the decided samples.
    """

    s_vision: float
    s_text: float
    s_others: float
    vision_ratio: float | None
    n: int
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], intervals: bool = False) -> Shares:
        """Count outcomes."""
        counts = (outcomes.count("vision"), outcomes.count("text"), outcomes.count("others"))
        return cls.of_counts(*counts, intervals=intervals)

    @classmethod
    def of_counts(cls, vision: int, text: int, others: int, intervals: bool = False) -> Shares:
        """Of so many samples of each category."""
        n, decided = vision + text + others, vision + text
        if n == 0:
            return cls(0.0, 0.0, 0.0, None, 0)
        found = {}
        if intervals:
            counts = {"s_vision": vision, "s_text": text, "s_others": others}
            found = {name: wilson(count, n) for name, count in counts.items()}
            if decided:
                found["vision_ratio"] = wilson(vision, decided)
        return cls(vision / n, text / n, others / n, vision / decided if decided else None, n, found)

    def toward(self, side: Side) -> float:
        """S_v or S_t."""
        return self.s_vision if side == "vision" else self.s_text

    def to_json(self) -> dict[str, Any]:
        """The five fields of the report, and as `NAME_95` their intervals where they were computed."""
        fields = {name: getattr(self, name) for name in ("s_vision", "s_text", "s_others", "vision_ratio", "n")}
        return fields | {f"{name}_95": list(interval) for name, interval in self.intervals.items()}
