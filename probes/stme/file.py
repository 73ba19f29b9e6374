"""STME's JSON files as samples.

A list of rows: `dataset_name`, `sample_id`, `context` with an `<ImageHere>` for every picture, `raw_img_list`, `target_id`
from 1, `response`. The options' texts are `choice_list`, in the row or in MileBench's own file of the task
(`DIR/NAME/NAME.json`), from which the rows come.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import isfile  # False, not an error, for a name that no file can have
from pathlib import Path, PurePosixPath
from typing import Any

from probes.harness.missing import MAX_MISSING, few
from probes.harness.reading import parsed, text_of
from probes.stme.samples import CAPTION, TargetSample

PLACE = "<ImageHere>"
PROMPT = "Your answer is: "
TAIL = "\nRespond with the answer and your thought process for reasoning."
"""The text behind every question but a caption's, in place of `PROMPT`.

The authors' scripts strip all characters of `PROMPT` from the question's end.
"""
PIXELS = ((15, 1280 * 28 * 28 // 5), (8, 1280 * 28 * 28 // 4), (0, 1280 * 28 * 28 // 3))
"""The most pixels of each picture, by the least number of pictures (the authors' script for Qwen2-VL; appendix C.1)."""

log = logging.getLogger(__name__)


@dataclass
class Left:
    """Samples that were left out, by reason."""

    images: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        reasons = {"an image is missing": self.images, "no image is the target": self.targets}
        shown = {why: ", ".join(names[:10]) + ", ..." * (len(names) > 10) for why, names in reasons.items() if names}
        return "; ".join(f"{why}: {names}" for why, names in shown.items())

    def __len__(self) -> int:
        return len(self.images) + len(self.targets)


def load(
    files: Sequence[str | Path], images: str | Path, choices: str | Path | None = None, full_size: bool = False
) -> tuple[list[TargetSample], Left]:
    """Return the samples of the files, and those left out because a picture is missing or none is the target.

    `images` is the folder that holds the pictures: by the path of the row, or by the end of that path. `choices` is
    MileBench's folder. Pictures are scaled down to `PIXELS` unless `full_size`. Raises ValueError that names the row,
    counted from 1, if one is invalid or a duplicate, and if more than `MAX_MISSING` of the samples are left out.
    """
    missing, samples, options = Left(), list[TargetSample](), _Options(choices)
    first_places: dict[str, str] = {}
    for file in files:
        for number, row in enumerate(_rows(Path(file)), 1):
            where = f"{file}, row {number}"
            sample = _sample(row, where, Path(images), options, missing, full_size)
            if sample is None:
                continue
            if sample.id in first_places:
                raise ValueError(f"{where}: sample {sample.id} stands in {first_places[sample.id]} already")
            first_places[sample.id] = where
            samples.append(sample)
    if missing and not few(len(missing), len(missing) + len(samples)):
        raise ValueError(
            f"{len(missing)} of {len(missing) + len(samples)} samples cannot be asked (at most {MAX_MISSING:.0%} may be "
            f"missing): {missing}"
        )
    if missing:
        log.warning("%d samples are left out: %s", len(missing), missing)
    return samples, missing


def _rows(file: Path) -> list[Any]:
    text = text_of(file)
    try:
        rows = parsed(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{file} must be a list of samples")
    return rows


def _sample(
    row: Any, where: str, folder: Path, options: _Options, missing: Left, full_size: bool
) -> TargetSample | None:  # fmt: skip
    """Return the sample of a row; None if it is left out, which `missing` then records."""
    try:
        task, number, context = str(row["dataset_name"]), row["sample_id"], str(row["context"])
        names, target, response = list(row["raw_img_list"]), row.get("target_id"), str(row["response"]).strip()
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where}: not a sample of STME: {error!r}") from error
    texts = context.split(PLACE)
    if len(texts) != len(names) + 1:
        raise ValueError(f"{where}: {len(names)} images for {len(texts) - 1} times {PLACE}")
    if task == CAPTION and not response.isdigit():
        raise ValueError(f"{where}: the response to a caption must be the number of an image; got {response!r}")
    name = f"{task}-{number}"
    if not isinstance(target, int) or not 1 <= target <= len(names):
        missing.targets.append(name)
        return None
    paths = [_path(folder, str(name)) for name in names]
    if None in paths:
        missing.images.append(name)
        return None
    try:
        choices = options.of(task, number, row)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if choices and response not in choices:
        raise ValueError(f"{where}: the response {response!r} is not among the options")
    if task != CAPTION and texts[-1].rstrip().endswith(PROMPT.rstrip()):
        texts[-1] = texts[-1].rstrip(PROMPT)  # strips characters: at another end it would cut letters
    pixels = next(pixels for most, pixels in PIXELS if len(names) >= most)
    try:
        return TargetSample(
            name, task, tuple(texts), tuple(path for path in paths if path), target, response, choices,
            "" if task == CAPTION else TAIL, None if full_size else pixels,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _path(folder: Path, name: str) -> Path | None:
    """Return the file in the folder, by the longest end of its path that exists there."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..")]
    paths = (folder.joinpath(*parts[start:]) for start in range(len(parts)))
    return next((path for path in paths if isfile(path)), None)


class _Options:
    """The options' texts of MileBench's files, each read once."""

    def __init__(self, folder: str | Path | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.known: dict[str, Mapping[str, Sequence[str]]] = {}

    def of(self, task: str, number: Any, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the options of a row; none for a task without a file."""
        if (listed := row.get("choice_list")) is not None:
            if not isinstance(listed, list):
                raise ValueError(f"'choice_list' must be a list of options; got {listed!r}")
            return tuple(map(str, listed))
        if self.folder is None:
            return ()
        if task not in self.known:
            self.known[task] = self._read(self.folder / task / f"{task}.json")
        return tuple(map(str, self.known[task].get(str(number), ())))

    @staticmethod
    def _read(file: Path) -> Mapping[str, Sequence[str]]:
        if not file.is_file():
            return {}
        try:
            rows = parsed(text_of(file))["data"]
            return {str(row["sample_id"]): row["task_instance"].get("choice_list", ()) for row in rows}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is not a file of MileBench: {error!r}") from error
