"""MC2's JSON file and its COCO images, read as samples."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from os.path import isfile  # False, not an error, for a name that no file can have
from pathlib import Path
from typing import Any

from probes.conflicts.samples import ConflictSample
from probes.harness.missing import MAX_MISSING, decoding
from probes.harness.reading import parsed, text_of

_FIELDS = ("image_id", "task", "question", "answer_vision", "answer_text", "context")
_log = logging.getLogger(__name__)


def load(
    json_path: str | Path, image_folder: str | Path, max_missing: float = MAX_MISSING, left_out: list[str] | None = None
) -> list[ConflictSample]:
    """Return the samples of MC2's JSON file whose COCO images are in `image_folder`.

    The folder is COCO 2014's (train2014/, val2014/), or holds the files directly, under their 2014 or 2017 names. Missing
    images are logged and their samples left out and added to `left_out`. Raises ValueError that names the row, counted from
    1, if one is malformed or a duplicate, and if there are no samples or more than `max_missing` of the images are missing.
    """
    try:
        rows = parsed(text_of(Path(json_path)))
    except ValueError as error:
        raise ValueError(f"{json_path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{json_path} must be a list of samples, not {type(rows).__name__}")
    if not rows:
        raise ValueError(f"{json_path} holds no samples")
    samples, missing = [], []
    first_rows: dict[tuple[str, ...], int] = {}
    for number, row in enumerate(rows, 1):
        fields = _check(row, f"{json_path}, row {number}")
        if (first := first_rows.setdefault(tuple(fields.values()), number)) != number:
            raise ValueError(f"{json_path}, row {number}: the same sample as row {first} (image {fields['image_id']})")
        path = _image_path(Path(image_folder), fields["image_id"])
        if path is None:
            missing.append(f"{fields['image_id']} (row {number})")
            continue
        name = f"{fields.pop('image_id')}-{number - 1}"  # from 0, as in `made_from` of vectors
        samples.append(ConflictSample(id=name, image=path, **fields))
    shown_names = ", ".join(missing[:20]) + (", ..." if len(missing) > 20 else "")
    if len(missing) > max_missing * len(rows):
        raise ValueError(
            f"{len(missing)} of the {len(rows)} images of {json_path} are not in {image_folder}, under their own or "
            f"their COCO 2014 names (at most {max_missing:.0%} may be missing): {shown_names}"
        )
    if missing:
        _log.warning(
            "%d of %d images are not in %s; their samples are skipped: %s",
            len(missing),
            len(rows),
            image_folder,
            shown_names,
        )
    if left_out is not None:
        left_out.extend(missing)
    return samples


def decodable(
    samples: Iterable[ConflictSample], count: int, max_broken: float = MAX_MISSING, left_out: list[str] | None = None
) -> list[ConflictSample]:
    """Return the first `count` samples, or fewer, whose pictures decode.

    The others are logged, left out as missing ones are, and added to `left_out`. Raises ValueError if more than `max_broken`
    of those examined do not decode.
    """
    decoded, broken = decoding(samples, count, ConflictSample.picture)
    tried = len(decoded) + len(broken)
    if len(broken) > max_broken * tried:
        raise ValueError(
            f"{len(broken)} of {tried} images do not decode (at most {max_broken:.0%} may be broken): "
            + "; ".join(broken[:5])
        )
    if broken:
        _log.warning(
            "%d of %d images do not decode; their samples are skipped: %s", len(broken), tried, "; ".join(broken[:20])
        )
    if left_out is not None:
        left_out.extend(broken)
    return decoded


def _check(row: Any, where: str) -> dict[str, str]:
    """Return the row's fields as stripped strings; raise ValueError that says what is wrong and where."""
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
    """Return the file of a COCO image id ("000000046962", or a file name), None if there is none."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", image_id) or ".." in image_id:
        return None
    number = image_id.zfill(12)
    names = [image_id, f"{number}.jpg"]
    for split in ("train2014", "val2014"):
        names += [f"{split}/COCO_{split}_{number}.jpg", f"COCO_{split}_{number}.jpg"]
    return next((folder / name for name in names if isfile(folder / name)), None)
