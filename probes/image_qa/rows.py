"""Rows of published files, and the images that they name; errors name the file and row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os.path import isfile  # False, not an error, for a name that no file can have
from pathlib import Path
from typing import Any, TypeVar

from probes.harness.missing import Incomplete, leave_out
from probes.harness.reading import parsed, text_of

T = TypeVar("T")


def read(file: Path) -> list[Any]:
    """Return the rows of a JSON list, or of one JSON object per line; raise ValueError that names the file, and the line."""
    text = text_of(file)
    if text.lstrip()[:1] == "[":
        try:
            return list(parsed(text))
        except ValueError as error:
            raise ValueError(f"{file} is not a JSON list: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(parsed(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: not JSON: {error}") from error
    return rows


def parse(
    file: Path, rows: Sequence[Any], make: Callable[[Mapping[str, Any], int], T], left_out: list[str] | None = None
) -> list[T]:
    """Return what `make` returns for each row and its number, from 1.

    Rows that lack something are left out and added to `left_out`. Raises ValueError if these are too many, and for an
    invalid row.
    """
    samples, missing = [], []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError("it is not an object")
            samples.append(make(row, number))
        except Incomplete as error:
            missing.append(f"{file}, row {number}: {error}")
        except KeyError as error:
            missing.append(f"{file}, row {number}: it has no {error.args[0]!r}")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, row {number}: {error}") from error
    leave_out(missing, len(rows), left_out)
    return samples


def of_files(
    files: Sequence[Path], make: Callable[[Mapping[str, Any], int], T], left_out: list[str] | None = None
) -> list[T]:
    """Return what `parse` returns for the rows of each file."""
    return [sample for file in files for sample in parse(file, read(file), make, left_out)]


def text(row: Mapping[str, Any], name: str) -> str:
    """Return the text of a field; raise Incomplete if there is none, and ValueError for anything else."""
    value = row.get(name)
    if value is None or value == "":
        raise Incomplete(f"it has no {name!r}")
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} must be a string; got {value!r}")
    return value


def texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the one or more texts of a field; raise KeyError if it is missing, and ValueError for anything else."""
    values = [row[name]] if isinstance(row[name], str) else row[name]
    if (
        not isinstance(values, list)
        or not values
        or not all(isinstance(value, str) and value.strip() for value in values)
    ):
        raise ValueError(f"{name!r} must be a string, or a list of strings")
    return tuple(values)


def image(folder: Path, *names: str) -> Path:
    """Return the first of these files that is in the folder, with or without its path; raise Incomplete if none is."""
    for name in names:
        for place in (folder / name, folder / Path(name).name):
            if isfile(place):
                return place
    alternatives = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise Incomplete(f"there is no image {folder / names[0]}{alternatives}")


def named(place: Path, number: int) -> str:
    """Return a sample's name from its image and its row's place, counted from 0."""
    return f"{place.stem}-{number - 1}"


def coco(folder: Path, number: str | int) -> Path:
    """Return COCO's image of that number, under any of the names that its releases and their folders give it."""
    padded = str(number).zfill(12)
    sets = [f"{split}{year}" for year in (2014, 2017) for split in ("val", "train")]
    return image(
        folder,
        *(f"{name}/COCO_{name}_{padded}.jpg" for name in sets),
        *(f"{name}/{padded}.jpg" for name in sets),
    )


def yes_or_no(value: Any) -> bool:
    """Return whether a file's answer is yes; raise ValueError for neither yes nor no, Incomplete if there is none."""
    if value is None:
        raise Incomplete("it has no answer")
    answer = str(value).strip().lower()
    if answer not in ("yes", "no", "true", "false", "1", "0"):
        raise ValueError(f"its answer must be yes or no; got {value!r}")
    return answer in ("yes", "true", "1")
