"""Rows of published files, and the images that they name; what is wrong is told with its file and row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os.path import isfile  # a name that no file can have is that of none
from pathlib import Path
from typing import Any, TypeVar

from probes.harness.missing import Incomplete, leave_out
from probes.harness.reading import parsed, text_of

T = TypeVar("T")


def read(file: Path) -> list[Any]:
    """The rows of a JSON list, or of a JSON object a line; raises ValueError that names the file, and the line."""
    text = text_of(file)
    if text.lstrip()[:1] == "[":
        try:
            return list(parsed(text))
        except ValueError as error:
            raise ValueError(f"{file} is no JSON list: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            rows.append(parsed(line))
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: no JSON: {error}") from error
    return rows


def made(
    file: Path, rows: Sequence[Any], make: Callable[[Mapping[str, Any], int], T], left: list[str] | None = None
) -> list[T]:
    """What is made of each row and its number, from 1. Rows that lack something are left out, and `left` says which; raises
    ValueError where these are too many, and for a row that is wrong."""
    found, missing = [], []
    for number, row in enumerate(rows, 1):
        try:
            if not isinstance(row, Mapping):
                raise ValueError("it is no object")
            found.append(make(row, number))
        except Incomplete as error:
            missing.append(f"{file}, row {number}: {error}")
        except KeyError as error:
            missing.append(f"{file}, row {number}: it has no {error.args[0]!r}")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}, row {number}: {error}") from error
    leave_out(missing, len(rows), left)
    return found


def text(row: Mapping[str, Any], name: str) -> str:
    """The text of a field; raises Incomplete where there is none, and ValueError for anything else."""
    given = row.get(name)
    if given is None or given == "":
        raise Incomplete(f"it has no {name!r}")
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{name!r} must be a text; got {given!r}")
    return given


def texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """The text, or the several texts, of a field; raises ValueError for anything else, and KeyError where there is none."""
    given = [row[name]] if isinstance(row[name], str) else row[name]
    if not isinstance(given, list) or not given or not all(isinstance(one, str) and one.strip() for one in given):
        raise ValueError(f"{name!r} must be a text, or several")
    return tuple(given)


def image(folder: Path, *names: str) -> Path:
    """The first of these files that is in the folder, also without the folders before its name; raises Incomplete where
    none is."""
    for name in names:
        for place in (folder / name, folder / Path(name).name):
            if isfile(place):
                return place
    others = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
    raise Incomplete(f"there is no image {folder / names[0]}{others}")


def named(place: Path, number: int) -> str:
    """What a sample is called: by its image and its row's place, counted from 0."""
    return f"{place.stem}-{number - 1}"


def coco(folder: Path, number: str | int) -> Path:
    """COCO's image of that number, under any of the names that its releases and their folders give it."""
    padded = str(number).zfill(12)
    sets = [f"{split}{year}" for year in (2014, 2017) for split in ("val", "train")]
    return image(
        folder,
        *(f"{one}/COCO_{one}_{padded}.jpg" for one in sets),
        *(f"{one}/{padded}.jpg" for one in sets),
    )


def told(value: Any) -> bool:
    """Yes or no as files write it; raises ValueError for anything else, Incomplete for nothing."""
    if value is None:
        raise Incomplete("it has no answer")
    said = str(value).strip().lower()
    if said not in ("yes", "no", "true", "false", "1", "0"):
        raise ValueError(f"its answer must be yes or no; got {value!r}")
    return said in ("yes", "true", "1")
