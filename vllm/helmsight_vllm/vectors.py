"""Steering vectors by name and digest, from folders that every rank can read."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load

FOLDERS = "HELMSIGHT_VECTORS"
"""The environment variable with the folders, separated as in PATH."""
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
TENSORS = ("direction", "weight", "mean_abs", "std")


class UnknownVector(Exception):
    """No folder has a vector of this name with this digest; `code` says which of the two is missing."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


class Vector(NamedTuple):
    """A vector as its file has it: direction (layers, d), weight (layers,)."""

    direction: torch.Tensor
    weight: torch.Tensor


def folders() -> list[Path]:
    """Return the folders of vectors: those of the environment, else the user's own."""
    given = os.environ.get(FOLDERS)
    own = Path("~/.helmsight/vectors").expanduser()
    return [Path(part) for part in given.split(os.pathsep) if part] if given else [own]


@functools.lru_cache(maxsize=256)
def load_vector(name: str, digest: str) -> Vector:
    """Return the vector of this name whose tensors have this digest; raise UnknownVector where no folder has it."""
    if not NAME.fullmatch(name):
        raise UnknownVector(f"{name[:64]!r} is no name of a vector.", "unknown_vector")
    files = [path for folder in folders() if (path := folder / f"{name}.safetensors").is_file()]
    for path in files:
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        if header.get("__metadata__", {}).get("sha256") == digest and _digest(tensors := load(data)) == digest:
            return Vector(tensors["direction"].float(), tensors["weight"].float())
    if files:
        raise UnknownVector(f"The vector {name!r} of the vLLM server has another digest.", "vector_differs")
    raise UnknownVector(f"The vLLM server has no vector {name!r} in {FOLDERS}.", "unknown_vector")


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the sha256 over the tensors' bytes, in the order in which Helmsight writes them."""
    hasher = hashlib.sha256()
    for name in TENSORS:
        hasher.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
