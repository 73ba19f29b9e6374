"""MME's question files in two forms.

As published, a folder for each subtask has a text file of two questions for each image; its evaluation script takes a text
file for each subtask with the image's name before each question.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from probes.harness.missing import Incomplete, leave_out
from probes.harness.reading import text_of
from probes.image_qa import rows
from probes.mme.samples import MmePair

ENDINGS = (".jpg", ".png", ".jpeg")


def load(data: Sequence[Path], images: Path, left_out: list[str] | None = None) -> list[MmePair]:
    """Return the pairs of questions of all subtasks.

    Pairs that lack a question or the image are left out and added to `left_out`. Raises ValueError that names the invalid
    file and line.
    """
    files = [file for path in data for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    pairs, missing = [], []
    for file in files:
        for group in _questions(file):
            try:
                pairs.append(group.pair(images))
            except Incomplete as error:
                missing.append(f"{file}: {error}")
    leave_out(missing, len(pairs) + len(missing), left_out)
    return pairs


@dataclass
class _Asked:
    """A file's questions on an image; wrong: why one of its lines is no question, None if all are."""

    image: str
    subtask: str
    questions: list[tuple[str, bool]] = field(default_factory=list)
    wrong: str | None = None

    def pair(self, folder: Path) -> MmePair:
        """Return both questions; raise Incomplete if there are not two, or the image does not exist."""
        if self.wrong is not None:
            raise Incomplete(self.wrong)
        if len(self.questions) != 2:
            raise Incomplete(f"MME asks two questions on each image; on {self.image} there are {len(self.questions)}")
        endings = ("",) if Path(self.image).suffix.lower() in ENDINGS else ENDINGS
        places = (f"{self.subtask}/images/{self.image}", f"{self.subtask}/{self.image}", self.image)
        image = rows.image(folder, *(place + ending for ending in endings for place in places))
        return MmePair(image, tuple(self.questions), self.subtask, f"{self.subtask}/{image.stem}")


def _questions(file: Path) -> Iterable[_Asked]:
    """Return the questions of a file by image."""
    lines = [line.split("\t") for line in text_of(file).splitlines() if line.strip()]
    groups: dict[str, _Asked] = {}
    names_image = bool(lines) and len(lines[0]) > 2
    subtask = file.stem if names_image else _subtask(file)
    for number, fields in enumerate(lines, 1):
        name, *answers = fields[:3] if names_image else (file.stem, *fields)
        group = groups.setdefault(name.strip(), _Asked(name.strip(), subtask))
        if len(answers) != 2:
            group.wrong = (
                f"line {number}: not a question of MME: a line is {'IMAGE TAB ' * names_image}QUESTION TAB ANSWER"
            )
            continue
        try:
            group.questions.append((answers[0].strip(), rows.yes_or_no(answers[1])))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not a question of MME: {error}") from error
    return groups.values()


def _subtask(file: Path) -> str:
    """Return the subtask, from its folder; some subtasks keep questions and images in separate folders."""
    return file.parent.parent.name if file.parent.name == "questions_answers_YN" else file.parent.name
