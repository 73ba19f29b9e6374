"""Lookup of a vector that is named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from steering import SteeringVector, VectorStore


def named(name: str, model: str | Path, folders: Sequence[Path], fingerprint: Callable[[], str]) -> SteeringVector:
    """Return a vector by its file, or by its name in these folders and the model's.

    As in a server, the first one that fits the model is taken. The model's fingerprint is requested only if vectors of
    several models share the name.
    """
    if Path(name).is_file():
        return SteeringVector.load(name)
    vectors = VectorStore(*folders, Path(model) / "vectors").all(name)
    if len({vector.fingerprint for vector in vectors}) == 1:
        return vectors[0]
    of_model = fingerprint()
    return next((vector for vector in vectors if vector.fingerprint == of_model), vectors[0])
