"""MM-SAP's questions from files: a folder with one of each part, or some of these files.

The authors publish the data at huggingface.co/datasets/Elliotwang/MM-SAP; their repository does not state its form. The
reader expects a JSON list, or a JSON object a line, with the fields of `FIELDS` under any of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from probes.harness.missing import Incomplete
from probes.image_qa import rows
from probes.mmsap.samples import PARTS, TITLES, Part, SapSample
from steering.interventions.refusal import REFUSAL

FIELDS: Mapping[str, tuple[str, ...]] = {
    "image": ("image", "image_path", "img", "img_path", "file_name"),
    "question": ("question", "query", "Q"),
    "options": ("options", "choices"),
    "answer": ("answer", "gt_answer", "gt", "label", "correct"),
    "subtask": ("type", "subtask", "category", "task"),
    "id": ("id", "index", "question_id"),
}
"""The fields of a row, by the names that they may have.

Options are a list, an object by letter, or fields A, B, C and so on; the answer is an option's letter or its text.
"""


def load(data: str | Path, images: str | Path | None = None, left_out: list[str] | None = None) -> list[SapSample]:
    """Return the questions of a folder or a file; their pictures are in `images`, or beside the file.

    Rows that lack something are left out and added to `left_out`. Raises ValueError that names the invalid file and row.
    """
    place = Path(data)
    files = (
        sorted(file for file in place.glob("*") if file.suffix in (".json", ".jsonl")) if place.is_dir() else [place]
    )
    files = [file for file in files if len(files) == 1 or _part(file.stem) is not None]
    if not files:
        names = ", ".join(f"{title}.json" for title in TITLES.values())
        raise ValueError(f"{place} holds none of MM-SAP's files, whose names hold the part: {names}")
    samples = []
    for file in files:
        make = partial(_sample, stem=file.stem, folder=Path(images) if images else file.parent)
        samples += rows.parse(file, rows.read(file), make, left_out)
    if not samples:
        raise ValueError(f"{place} holds no questions")
    return samples


def _sample(row: Mapping[str, Any], number: int, stem: str, folder: Path) -> SapSample:
    part = _part(str(row.get("part") or row.get("dataset") or "")) or _part(stem)
    if part is None:
        raise ValueError(f"neither its part nor the file's name is one of {', '.join(TITLES.values())}")
    options = _options(row)
    answer = _answer(row, options)
    if (answer is None) is not (part == "beyond"):
        raise ValueError(f"of {TITLES[part]}, its answer is {'the refusal' if answer is None else repr(answer)}")
    image = rows.image(folder, str(_field(row, "image")))
    name = f"{part} {_field(row, 'id', number)}"
    offered = tuple(option for option in options.values() if not _refuses(option))
    return SapSample(
        name, part, str(_field(row, "subtask", "all of it")), image, str(_field(row, "question")), offered, answer
    )


def _field(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    for key in FIELDS[name]:
        if row.get(key) is not None:
            return row[key]
    if default is None:
        raise Incomplete(f"it has no {' or '.join(FIELDS[name])}")
    return default


def _options(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the options' texts by letter."""
    options_given = next((row[key] for key in FIELDS["options"] if row.get(key)), None)
    if options_given is None:
        options_given = {letter: row[letter] for letter in ascii_uppercase if row.get(letter) is not None}
    if isinstance(options_given, Mapping):
        options = {str(letter).strip("(). ").upper(): str(text) for letter, text in options_given.items()}
    elif isinstance(options_given, Sequence) and not isinstance(options_given, str):
        options = dict(zip(ascii_uppercase, map(_bare, options_given, ascii_uppercase), strict=False))
    else:
        raise ValueError(f"its options are {options_given!r}")
    texts = [option for option in options.values() if not _refuses(option)]
    if len(texts) < 2 or len({*texts}) < len(texts):
        raise ValueError(f"it needs at least two different options beside the refusal; it has {texts}")
    return options


def _bare(text: Any, letter: str) -> str:
    """Return an option without the letter that it may begin with."""
    stripped = str(text).strip()
    return stripped[2:].strip() if stripped[:2] in (f"{letter}.", f"{letter})", f"{letter}:") else stripped


def _answer(row: Mapping[str, Any], options: Mapping[str, str]) -> str | None:
    """Return the right option, or None for the refusal, which a row of BeyondVisQA without an answer means."""
    value = next((row[key] for key in FIELDS["answer"] if row.get(key) is not None), None)
    if value is None:
        return None
    answer = str(value).strip()
    text = options.get(answer.strip("(). ").upper(), answer)
    if _refuses(text):
        return None
    match = next((option for option in options.values() if option.casefold() == text.casefold()), None)
    if match is None:
        raise ValueError(f"its answer {answer!r} is not among its options")
    return match


def _refuses(option: str) -> bool:
    return option.replace("\u2019", "'").strip(" .").casefold() == REFUSAL.casefold()


def _part(name: str) -> Part | None:
    return next((part for part in PARTS if part in name.casefold()), None)
