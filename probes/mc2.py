"""The MC2 conflict benchmark (modality-preference paper, section 3): samples, prompts, scoring and the three shares.

Every question is asked twice with its options swapped. A sample counts for a modality only if both answers follow it;
anything else, also an answer that names no option, is "others".
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

Setting = Literal["plain", "text", "vision", "context_only", "image_only"]
"""What is shown: both modalities without or with an instruction toward one of them, or one modality alone."""

Outcome = Literal["vision", "text", "others"]

# Word for word as the authors' code has them: only the last two names are swapped (method.md, section 2).
INSTRUCTIONS: dict[str, str] = {
    "text": "In case there is an inconsistency between the text context and the image content, you should follow the "
    "text context rather than the image content.",
    "vision": "In case there is an inconsistency between the text context and the image content, you should follow the "
    "image content rather than the text context.",
}
REQUEST = "Answer the question by selecting the correct answer A or B."
LETTERS = ("A", "B")

_FIELDS = ("image_id", "task", "question", "answer_vision", "answer_text", "context")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """One conflict: the image supports `answer_vision`, the text context supports `answer_text`.

    `image` may be a path, which is opened when a prompt is built, so that thousands of samples need no memory.
    """

    id: str
    task: str
    image: Image.Image | Path
    question: str
    answer_vision: str
    answer_text: str
    context: str

    def picture(self) -> Image.Image:
        """The decoded RGB image."""
        if isinstance(self.image, Image.Image):
            return self.image
        with Image.open(self.image) as file:
            return file.convert("RGB")

    def options(self, swapped: bool) -> tuple[str, str]:
        """The texts of options A and B; unswapped, A is the vision answer."""
        pair = (self.answer_vision, self.answer_text)
        return (pair[1], pair[0]) if swapped else pair


def prompt(sample: Sample, setting: Setting, swapped: bool) -> str:
    """The user's text, word for word as in the paper; an empty context leaves its line out."""
    first, second = sample.options(swapped)
    lines = [
        f"Text context: {sample.context}" if sample.context and setting != "image_only" else None,
        INSTRUCTIONS.get(setting),
        sample.question,
        f"A. {first}",
        f"B. {second}",
        REQUEST,
    ]
    return "\n".join(line for line in lines if line is not None)


def messages(sample: Sample, setting: Setting, swapped: bool) -> list[dict[str, Any]]:
    """The chat with that prompt, the image first."""
    parts: list[dict[str, Any]] = [] if setting == "context_only" else [{"type": "image", "image": sample.picture()}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt(sample, setting, swapped)}]}]


# ------------------------------------------------------------------------------------------------------- scoring


_LEADING = re.compile(r"[\s*_\"'`(\[]*([ABab])(?=[\s*_\"'`]*(?:$|[.:;,)\]])|\n|\s+-)")
_CALLED = re.compile(
    r"\b(?i:answer|option|choice)(?:\s+(?i:is|would be|should be))?\s*[:=]?\s*[*_\"'`(\[]*(?:(?i:option)\s+)?([AB])\b"
)
_SET_OFF = re.compile(r"(?<!\w)\(?([AB])(?:\)|\.(?=\s|$)|:(?=\s))")


def letter(answer: str, options: Sequence[str]) -> str | None:
    """Which option an answer chooses: "A", "B", or None where it names none or both.

    Read in this order: a leading letter ("B", "(B)", "B. four", "**B**"), a letter that is called the answer ("The
    correct answer is B", "Answer: B"), a letter set off as an option ("... so B)"), the text of exactly one option.
    """
    text = answer.strip()
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

    `interval` is the 95 % bootstrap interval of the ratio over samples.
    """

    s_vision: float
    s_text: float
    s_others: float
    vision_ratio: float | None
    n: int
    interval: tuple[float, float] | None = None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], resamples: int = 0, seed: int = 0) -> Shares:
        """Count outcomes; `resamples` > 0 adds the interval."""
        n = len(outcomes)
        vision, text = outcomes.count("vision"), outcomes.count("text")
        ratio = vision / (vision + text) if vision + text else None
        if n == 0:
            return cls(0.0, 0.0, 0.0, None, 0)
        interval = _interval(outcomes, resamples, seed) if resamples and ratio is not None else None
        return cls(vision / n, text / n, (n - vision - text) / n, ratio, n, interval)

    def to_json(self) -> dict[str, Any]:
        """The five fields of the report, and the interval where it was computed."""
        fields = asdict(self)
        interval = fields.pop("interval")
        return fields | ({"vision_ratio_95": list(interval)} if interval else {})


def _interval(outcomes: Sequence[Outcome], resamples: int, seed: int) -> tuple[float, float] | None:
    rng = random.Random(seed)
    ratios = []
    for _ in range(resamples):
        drawn = rng.choices(outcomes, k=len(outcomes))
        vision, text = drawn.count("vision"), drawn.count("text")
        if vision + text:
            ratios.append(vision / (vision + text))
    ratios.sort()
    return (ratios[int(0.025 * len(ratios))], ratios[int(0.975 * (len(ratios) - 1))]) if ratios else None


# -------------------------------------------------------------------------------------------------------- loading


def load(json_path: str | Path, image_folder: str | Path) -> list[Sample]:
    """The samples of MC2's JSON file whose COCO images are in `image_folder`.

    A folder of COCO 2014 (train2014/, val2014/), or one that holds the files directly, under their 2014 or 2017 names.
    Missing images are named in the log and their samples left out. Raises ValueError that names the row where a row
    is malformed, and where no image at all was found.
    """
    try:
        rows = json.loads(Path(json_path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{json_path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{json_path} must be a list of samples, not {type(rows).__name__}")
    samples, missing = [], []
    for number, row in enumerate(rows):
        fields = _checked(row, f"{json_path}, row {number}")
        path = _image_path(Path(image_folder), fields["image_id"])
        if path is None:
            missing.append(fields["image_id"])
            continue
        name = f"{fields.pop('image_id')}-{number}"
        samples.append(Sample(id=name, image=path, **fields))
    if missing:
        _log.warning(
            "%d of %d images are not in %s; their samples are skipped: %s%s", len(missing), len(rows), image_folder,
            ", ".join(missing[:20]), ", ..." if len(missing) > 20 else "",
        )  # fmt: skip
    if rows and not samples:
        raise ValueError(
            f"None of the {len(rows)} images of {json_path} is in {image_folder}; expected COCO 2014 there"
        )
    return samples


def _checked(row: Any, where: str) -> dict[str, str]:
    """The row's fields as stripped strings; raises ValueError that says what is wrong and where."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object, not {type(row).__name__}")
    for name in _FIELDS:
        value = row.get(name)
        if isinstance(value, dict) and name == "context":  # the authors' scripts nest it: {"icc": ...}
            value = value.get("icc")
        if isinstance(value, int) and name == "image_id" and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: {name!r} must be a non-empty string, got {value!r}")
        row = row | {name: value.strip()}
    if row["answer_vision"].lower() == row["answer_text"].lower():
        raise ValueError(f"{where}: both answers are {row['answer_text']!r}, so there is no conflict")
    return {name: row[name] for name in _FIELDS}


def _image_path(folder: Path, image_id: str) -> Path | None:
    """The file of a COCO image id ("000000046962", or a file name), None where there is none."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", image_id) or ".." in image_id:
        return None
    number = image_id.zfill(12)
    names = [image_id, f"{number}.jpg"]
    for split in ("train2014", "val2014"):
        names += [f"{split}/COCO_{split}_{number}.jpg", f"COCO_{split}_{number}.jpg"]
    return next((folder / name for name in names if (folder / name).is_file()), None)
