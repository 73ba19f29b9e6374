"""Sample scenes of a model: images in its folder's `samples/`, listed in `samples/samples.json` with a question each."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

log = logging.getLogger("helmsight")

MAX_LISTING = 2**18
MAX_PICTURE = 2**21
"""Largest size in bytes of samples.json and of one image; larger ones are not offered."""

KINDS = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp"}
_PICTURE = re.compile(rf"[A-Za-z0-9][\w-]{{0,99}}\.(?:{'|'.join(KINDS)})", re.ASCII)

Text = Annotated[str, StringConstraints(max_length=4000)]


class Sample(BaseModel):
    """A sample: image file names, a question, and a text that may contradict the images."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    title: Annotated[str, StringConstraints(min_length=1, max_length=80)]
    images: Annotated[tuple[str, ...], Field(max_length=16)]
    question: Text
    context: Text | None = None


_SAMPLES = TypeAdapter(Annotated[list[Sample], Field(max_length=64)])


def list_samples(model_folder: Path | None) -> list[Sample]:
    """Return a model's samples whose images all exist; empty without a valid listing."""
    if model_folder is None or not (file := model_folder / "samples" / "samples.json").is_file():
        return []
    try:
        if file.stat().st_size > MAX_LISTING:
            raise ValueError(f"more than {MAX_LISTING} bytes")
        samples = _SAMPLES.validate_json(file.read_bytes())
    except (OSError, ValueError) as error:
        problem = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else error
        log.warning("%s is not used: %s", file, problem)
        return []
    return [sample for sample in samples if all(_fits(file.parent, name) for name in sample.images)]


def sample_picture(model_folder: Path | None, name: str) -> tuple[bytes, str] | None:
    """Return (bytes, media type) of an image that a sample names; None for any other name, which is never looked up."""
    if model_folder is None or all(name not in sample.images for sample in list_samples(model_folder)):
        return None
    return (model_folder / "samples" / name).read_bytes(), KINDS[name.rpartition(".")[2]]


def _fits(folder: Path, name: str) -> bool:
    """Return whether `name` is a plain file name of an existing image that is not too large."""
    if not _PICTURE.fullmatch(name):
        return False
    try:
        return 0 < (folder / name).stat().st_size <= MAX_PICTURE
    except OSError:
        return False
