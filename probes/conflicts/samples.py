"""The MC2 conflict benchmark (modality-preference paper, section 3): samples, prompts, scoring and the three shares.

Every question is asked twice with its options swapped. A sample counts for a modality only if both answers follow it;
anything else, also an answer that names no option, is "others".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from PIL import Image

from probes.harness.pictures import Source, picture

Side = Literal["vision", "text"]
SIDES: tuple[Side, Side] = ("vision", "text")

Setting = Literal[
    "plain", "text", "vision", "chain_text", "chain_vision", "shots_text", "shots_vision", "context_only", "image_only"
]  # fmt: skip
"""What is shown: both modalities without or with an instruction toward one of them, with a chain of thought or solved
examples that follow one of them, or one modality alone."""

Outcome = Literal["vision", "text", "others"]

Wording = Literal["paper", "v2", "v1"]
"""Which of the authors' three pairs of instructions: the one that their file marks as used in the paper, version 2, version
1."""

_TOWARD_VISION = (
    "In case there is an inconsistency between the text context and the image content, you should follow the image content "
    "rather than the text context. "
)
WORDINGS: dict[Wording, dict[Side, str]] = {
    "paper": {
        "text": "In case there is an inconsistency between the Text Context and the input image content, you must rely on "
        "the text context rather than the input image content. ",
        "vision": _TOWARD_VISION,
    },
    "v2": {
        "text": "In case there is an inconsistency between the text context and the image content, you should follow the "
        "text context rather than the image content. ",
        "vision": _TOWARD_VISION,
    },
    "v1": {
        "text": "In case there is an inconsistency between the text context and the input image content, prioritize the "
        "information from the text context. ",
        "vision": _TOWARD_VISION,
    },
}
"""The instructions word for word as in the authors' prompt.py (github.com/EchoDreamer/Modality-Preference), each with the
space that it ends in there; the one toward vision is the same in all three."""

REQUEST = "Answer the question by selecting the correct answer A or B."
CHAIN_REQUEST = (
    "Carefully distinguish between image and text content and output the thinking process in <think> </think> and final "
    "answer option in <answer> </answer> tags."
)
LETTERS = ("A", "B")


@dataclass(frozen=True)
class Sample:
    """One conflict: the image supports `answer_vision`, the text context supports `answer_text`.

    `image` may be a path, or a function that makes the picture: what is opened or made when a prompt is built, so that
    thousands of samples need no memory.
    """

    id: str
    task: str
    image: Source
    question: str
    answer_vision: str
    answer_text: str
    context: str

    def picture(self) -> Image.Image:
        """The decoded RGB image; raises ValueError that names the sample where its file does not decode."""
        return picture(self.image, f"sample {self.id}")

    def options(self, swapped: bool) -> tuple[str, str]:
        """The texts of options A and B; unswapped, A is the vision answer."""
        pair = (self.answer_vision, self.answer_text)
        return (pair[1], pair[0]) if swapped else pair


def prompt(sample: Sample, setting: Setting, swapped: bool, wording: Wording = "paper") -> str:
    """The user's text, word for word as the authors' steer_qwen_search_scale.py puts it together; an empty context, which
    their data do not have, leaves its line out.

    Of a chain of thought that script holds the template, "{Question} Carefully ...", but as released it neither fills it in
    nor reads its tags. Here it is filled with the prompt up to its options, in place of the request for a letter.
    """
    first, second = sample.options(swapped)
    lines = [
        f"Text context: {sample.context}" if sample.context and setting != "image_only" else None,
        _instruction(setting, wording),
        sample.question,
        f"A. {first}",
        f"B. {second} {CHAIN_REQUEST}" if setting.startswith("chain_") else f"B. {second}\n{REQUEST}",
    ]
    return "\n".join(line for line in lines if line is not None)


def _instruction(setting: Setting, wording: Wording) -> str | None:
    match setting.removeprefix("chain_"):
        case "vision" | "text" as side:
            return WORDINGS[wording][side]
    return None


def messages(
    sample: Sample, setting: Setting, swapped: bool, shots: Sequence[Sample] = (), wording: Wording = "paper"
) -> list[dict[str, Any]]:
    """The chat with that prompt, the image first; `shots` are solved before it where the setting wants them.

    Every other shot has its options swapped, so that both letters are right equally often.
    """
    chat = []
    if setting in ("shots_text", "shots_vision"):
        for number, shot in enumerate(shots):
            turned = number % 2 == 1
            letter_of_vision = LETTERS[turned]
            said = letter_of_vision if setting == "shots_vision" else LETTERS[not turned]
            chat += [_asked(shot, "plain", turned, wording), {"role": "assistant", "content": said}]
    return [*chat, _asked(sample, setting, swapped, wording)]


def _asked(sample: Sample, setting: Setting, swapped: bool, wording: Wording) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [] if setting == "context_only" else [{"type": "image", "image": sample.picture()}]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt(sample, setting, swapped, wording)}]}


# ------------------------------------------------------------------------------------------------------- scoring


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

    `intervals`: the 95 % bootstrap intervals over samples, by field, where they were computed.
    """

    s_vision: float
    s_text: float
    s_others: float
    vision_ratio: float | None
    n: int
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], resamples: int = 0, seed: int = 0) -> Shares:
        """Count outcomes; `resamples` > 0 adds the intervals."""
        n = len(outcomes)
        counts = np.array([outcomes.count(name) for name in ("vision", "text", "others")])
        vision, text, others = counts.tolist()
        ratio = vision / (vision + text) if vision + text else None
        if n == 0:
            return cls(0.0, 0.0, 0.0, None, 0)
        intervals = _intervals(counts, resamples, seed) if resamples else {}
        return cls(vision / n, text / n, others / n, ratio, n, intervals)

    def toward(self, side: Side) -> float:
        """S_v or S_t."""
        return self.s_vision if side == "vision" else self.s_text

    def to_json(self) -> dict[str, Any]:
        """The five fields of the report, and as `NAME_95` their intervals where they were computed."""
        fields = {name: getattr(self, name) for name in ("s_vision", "s_text", "s_others", "vision_ratio", "n")}
        return fields | {f"{name}_95": list(interval) for name, interval in self.intervals.items()}


def _intervals(counts: np.ndarray, resamples: int, seed: int) -> dict[str, tuple[float, float]]:
    """Samples drawn anew with replacement have multinomial counts."""
    drawn = np.random.default_rng(seed).multinomial(counts.sum(), counts / counts.sum(), resamples)
    shares = drawn / counts.sum()
    decided = drawn[:, 0] + drawn[:, 1]
    values = dict(zip(("s_vision", "s_text", "s_others"), shares.T, strict=True))
    values["vision_ratio"] = drawn[decided > 0, 0] / decided[decided > 0]
    return {
        name: (float(np.quantile(one, 0.025)), float(np.quantile(one, 0.975)))
        for name, one in values.items()
        if len(one)
    }
