"""POPE's question files: one JSON object a line with `image`, `text` and `label` (Li et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from probes.image_qa import rows
from probes.image_qa.yes_no import YesNo

Strategy = Literal["random", "popular", "adversarial"]
"""The way in which an absent object was drawn.

It is drawn at random, by frequency (popular), or by its co-occurrence with the present objects (adversarial).
"""


def load(files: Sequence[str | Path], image_folder: str | Path, left_out: list[str] | None = None) -> list[YesNo]:
    """Return the questions of several files, each named after its setting (coco_pope_popular.json).

    Rows that lack something are left out and added to `left_out`. Raises ValueError that names the invalid file and row.
    """
    return [sample for file in files for sample in _questions(Path(file), Path(image_folder), left_out)]


def _questions(file: Path, folder: Path, left_out: list[str] | None) -> list[YesNo]:
    table = rows.read(file)
    settings = [setting for setting in get_args(Strategy) if setting in file.stem]
    if len(settings) != 1:
        raise ValueError(f"{file}: its name must hold one of {', '.join(get_args(Strategy))}")
    return rows.parse(file, table, partial(_question, folder=folder, setting=settings[0]), left_out)


def _question(row: Mapping[str, Any], number: int, folder: Path, setting: str) -> YesNo:
    image = rows.image(folder, rows.text(row, "image"))
    return YesNo(image, rows.text(row, "text"), rows.yes_or_no(row["label"]), setting, id=rows.named(image, number))
