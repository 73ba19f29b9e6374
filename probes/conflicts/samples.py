"""The MC2 conflict benchmark (modality-preference paper, section 3): samples and prompts.

Every question is asked twice with its options swapped; `shares` scores the answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image

from probes.harness.pictures import Source, picture

Side = Literal["vision", "text"]
SIDES: tuple[Side, Side] = ("vision", "text")

Setting = Literal[
    "plain", "text", "vision", "chain_text", "chain_vision", "shots_text", "shots_vision", "context_only", "image_only"
]  # fmt: skip
"""The content of a prompt.

Both modalities without or with an instruction toward one of them, with a chain of thought or solved examples that follow one
of them, or one modality alone.
"""

Wording = Literal["paper", "v2", "v1", "case"]
"""The choice among the authors' instructions.

These are the pair that their file marks as used in the paper, version 2, version 1; and the short one of the case that the
paper shows (figure 12).
"""

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
    "case": {
        "text": "In case of inconsistency, prioritize the text context. ",
        "vision": "In case of inconsistency, prioritize the image content. ",
    },
}
"""The instructions word for word as in the authors' prompt.py (github.com/EchoDreamer/Modality-Preference).

Each keeps its trailing space. The one toward vision is the same in all three of that file. For the case, the paper shows
only the instruction toward the text; the other is modelled on it.
"""
PUBLISHED: tuple[Wording, ...] = ("paper", "v2", "v1")
"""The wordings of that file."""

REQUEST = "Answer the question by selecting the correct answer A or B."
CHAIN_REQUEST = (
    "Carefully distinguish between image and text content and output the thinking process in <think> </think> and final "
    "answer option in <answer> </answer> tags."
)
LETTERS = ("A", "B")


@dataclass(frozen=True)
class ConflictSample:
    """A conflict: the image supports `answer_vision`, the text context supports `answer_text`.

    `image` may be a path, or a function that makes the picture; it is opened or made only when a prompt is built, so that
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
        """Return the decoded RGB image; raise ValueError that names the sample if its file does not decode."""
        return picture(self.image, f"sample {self.id}")

    def options(self, swapped: bool) -> tuple[str, str]:
        """Return the texts of options A and B; unswapped, A is the vision answer."""
        pair = (self.answer_vision, self.answer_text)
        return (pair[1], pair[0]) if swapped else pair


def prompt(sample: ConflictSample, setting: Setting, swapped: bool, wording: Wording = "paper") -> str:
    """Return the user's text, word for word as the authors' steer_qwen_search_scale.py assembles it.

    An empty context, which their data do not have, leaves its line out. For a chain of thought that script holds the
    template, "{Question} Carefully ...", but as released it neither fills it in nor reads its tags. Here it is filled with
    the prompt up to its options, in place of the request for a letter.
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
    sample: ConflictSample,
    setting: Setting,
    swapped: bool,
    shots: Sequence[ConflictSample] = (),
    wording: Wording = "paper",
) -> list[dict[str, Any]]:
    """Return the chat with that prompt, the image first; `shots` are solved before it in the settings that use them.

    Every other shot has its options swapped, so that both letters are right equally often.
    """
    chat = []
    if setting in ("shots_text", "shots_vision"):
        for number, shot in enumerate(shots):
            turned = number % 2 == 1
            letter_of_vision = LETTERS[turned]
            answer = letter_of_vision if setting == "shots_vision" else LETTERS[not turned]
            chat += [_question(shot, "plain", turned, wording), {"role": "assistant", "content": answer}]
    return [*chat, _question(sample, setting, swapped, wording)]


def _question(sample: ConflictSample, setting: Setting, swapped: bool, wording: Wording) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [] if setting == "context_only" else [{"type": "image", "image": sample.picture()}]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt(sample, setting, swapped, wording)}]}
