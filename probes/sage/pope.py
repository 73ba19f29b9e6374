"""POPE's question files: one JSON object a line with `image`, `text` and `label` (Li et al. 2023)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from probes.sage.samples import Existence, Strategy


def load(files: Sequence[str | Path], image_folder: str | Path) -> list[Existence]:
    """The questions of several files, each named after its setting (coco_pope_popular.json).

    Raises ValueError that names the file and line of a row that is wrong or whose image is missing.
    """
    return [sample for file in files for sample in _rows(Path(file), Path(image_folder))]


def _rows(file: Path, folder: Path) -> list[Existence]:
    settings = [setting for setting in get_args(Strategy) if setting in file.stem]
    if len(settings) != 1:
        raise ValueError(f"{file}: its name must hold one of {', '.join(get_args(Strategy))}")
    samples = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            image, text, label = (str(row[key]) for key in ("image", "text", "label"))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{file}, line {number}: no POPE question: {error!r}") from error
        if label.lower() not in ("yes", "no"):
            raise ValueError(f"{file}, line {number}: the label must be yes or no; got {label!r}")
        path = folder / Path(image).name
        if not path.is_file():
            raise ValueError(f"{file}, line {number}: there is no image {path}")
        samples.append(Existence(path, text, label.lower() == "yes", settings[0]))
    return samples
