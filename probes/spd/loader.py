"""The published files of SPD-Faith Bench: a folder for each pair of pictures, or rows that name merged pictures.

A pair's folder holds {id}_original.jpg, a changed picture ({id}_modified_final.jpg, or any that is neither the original nor
merged), maybe merged.jpg, and a JSON file with `modifications` (or `differences`, as the authors' generator logs them): a
list of {type, category, target_color}. Each change in a log is a single difference with its own picture
({id}_modified_diff_1.jpg and so on), and `complexity` is its difficulty, which otherwise is a folder's name. Rows are JSON,
one a line or a list: `qid` (or `sample_id`), `modifications`, and `image`, a merged picture, or none, if a folder named
after the row holds the pictures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os.path import isfile  # False, not an error, for a name that no file can have
from pathlib import Path
from typing import Any

from probes.harness.reading import parsed, text_of
from probes.image_pairs.claims import difference
from probes.spd.samples import DIFFICULTIES, Difficulty, PicturePair

PICTURES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Loaded:
    """The pairs of a file or folder, and those left out, with the reason, by the name of the pair."""

    pairs: Sequence[PicturePair]
    left_out: Mapping[str, str]


def load(path: str | Path, images: str | Path | None = None) -> Loaded:
    """Return the pairs of a folder of pairs' folders, or of a file of rows with pictures below `images`.

    `images` defaults to the file's folder. Pairs without a picture or without modifications are left out. Raises ValueError
    if none remain, and for an invalid row.
    """
    source = Path(path)
    pairs: list[PicturePair] = []
    left_out: dict[str, str] = {}
    rows = _rows(source, Path(images or source.parent)) if source.is_file() else _folders(source)
    for name, pair in rows:
        if isinstance(pair, str):
            left_out[name] = pair
        else:
            pairs.append(pair)
    if not pairs:
        why = next((f": {name} has {reason}" for name, reason in left_out.items()), "")
        raise ValueError(
            f"{source} holds no pair of images of SPD-Faith Bench{why}. A pair is a folder with NAME_original.jpg, the "
            "changed image and a JSON file of modifications, or a row of a .jsonl file with `image` and `modifications`."
        )
    return Loaded(pairs, left_out)


def _folders(root: Path) -> Iterable[tuple[str, PicturePair | str]]:
    """Yield every pair of the folders below, by its name, or the reason why it cannot be asked about."""
    if not root.is_dir():
        raise ValueError(f"{root}: no such file or folder")
    for original in sorted(root.rglob("*_original.*")):
        folder = original.parent
        files = sorted(folder.glob("*.json"))
        if len(files) != 1:
            yield folder.name, f"{len(files) or 'no'} JSON file{'s' * (len(files) > 1)} of modifications"
            continue
        try:
            fields = parsed(text_of(files[0]))
        except ValueError as error:
            raise ValueError(f"{files[0]} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ValueError(f"{files[0]} is not an object with modifications")
        if "differences" in fields and "modifications" not in fields:
            yield from _read_log(folder, original, fields)
        else:
            yield folder.name, _pair(folder.name, folder, fields, str(files[0]))


def _read_log(folder: Path, original: Path, log: Mapping[str, Any]) -> Iterable[tuple[str, PicturePair | str]]:
    """Yield the single differences of a generator's log."""
    for number, entry in enumerate(log["differences"], 1):
        name = f"{folder.name}_{number}"
        if not isinstance(entry, dict) or "category" not in entry:
            yield name, "no category in the log"
            continue
        changed = next(iter(sorted(folder.glob(f"*_diff_{entry.get('diff_index', number)}.*"))), None)
        if changed is None:
            yield name, "no changed picture"
            continue
        difficulty = _difficulty(str(log.get("complexity", "")), str(folder)) or "unrated"
        yield name, PicturePair(name, (difference(entry),), original, changed, difficulty=difficulty)


def _rows(file: Path, images: Path) -> Iterable[tuple[str, PicturePair | str]]:
    text = text_of(file)
    try:
        rows = parsed(text) if text.lstrip().startswith("[") else [parsed(line) for line in text.splitlines()]
    except ValueError as error:
        raise ValueError(f"{file} is neither a JSON list nor JSON lines: {error}") from error
    for number, row in enumerate(rows, 1):
        place = f"{file}, row {number}"
        name = str(row.get("qid") or row.get("sample_id") or "") if isinstance(row, dict) else ""
        if not name:
            raise ValueError(f"{place}: not a row of SPD-Faith Bench: `qid` or `sample_id` is missing")
        fields = row.get("ground_truth", row)
        if not row.get("image"):
            yield name, _pair(name, images / name, fields, place)
            continue
        if not isinstance(row["image"], str):
            raise ValueError(f"{place}: `image` must be the name of a file; got {row['image']!r}")
        merged_path = next(
            (path for path in (images / row["image"], images / Path(row["image"]).name) if isfile(path)), None
        )
        if merged_path is None:
            yield name, f"no picture {row['image']}"
        else:
            yield name, _make_pair(name, fields, place, f"{row['image']} {name}", merged=merged_path)


def _pair(name: str, folder: Path, fields: Mapping[str, Any], place: str) -> PicturePair | str:
    """Return the pair whose pictures are in a folder."""
    pictures = [path for path in sorted(folder.glob("*")) if path.suffix.lower() in PICTURES]
    first = next((path for path in pictures if "original" in path.stem), None)
    merged = next((path for path in pictures if "merged" in path.stem), None)
    changed = sorted(
        (path for path in pictures if path not in (first, merged)), key=lambda path: "modified_final" not in path.stem
    )
    if first is not None and changed:
        return _make_pair(name, fields, place, str(folder), first=first, second=changed[0], merged=merged)
    if merged is not None:
        return _make_pair(name, fields, place, str(folder), merged=merged)
    return "no original or no changed image"


def _make_pair(
    name: str, fields: Mapping[str, Any], place: str, where: str, **pictures: Path | None
) -> PicturePair | str:
    rows = fields.get("modifications")
    if not rows:
        return "no modifications"
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and {"type", "category"} <= row.keys() for row in rows
    ):
        raise ValueError(f"{place}: modifications must be a list of objects with `type` and `category`")
    true = tuple(difference(row) for row in rows)
    difficulty = _difficulty(str(fields.get("difficulty", "")), where)
    return PicturePair(name, true, **pictures, difficulty=(difficulty or "unrated") if len(true) == 1 else None)


def _difficulty(difficulty: str, where: str) -> Difficulty | None:
    """Return the stated difficulty, otherwise the one in the name of a folder or file."""
    words = [difficulty.lower(), *re.split(r"[/\\_\s.]", where.lower())]
    return next((level for word in words for level in DIFFICULTIES if word == level), None)
