"""Resolving names of steering vectors, the only place of the server that does so for options."""

from __future__ import annotations

from pydantic import BaseModel

from steering import Diagnose, PinError, SteeringVector, VectorError, VectorStore
from steering.protocol.intervention_spec import Model, vector_fields, with_vectors


def resolved(model: Model, place: str, store: VectorStore) -> Model:
    """Return options with names replaced by vectors; raises VectorError naming the field.

    `place` is the options' place in a request.
    """
    return with_vectors(model, lambda value, key: lookup(value, f"{place}.{key}", store))


def looked_up(diagnose: Diagnose, store: VectorStore) -> Diagnose:
    """Return readouts with what their options name; raises VectorError naming the field."""
    try:
        return diagnose.looked_up(store)
    except VectorError as error:
        raise VectorError(str(error), param="diagnostics", code=error.code) from error


def has_defaults(model: type[BaseModel], store: VectorStore, fingerprint: str) -> bool:
    """Return whether the store has every vector that options name by default, for a model with this fingerprint."""
    defaults = [model.model_fields[name].default for name in vector_fields(model)]
    return all(name is None or has(store, name, fingerprint) for name in defaults)


def has(store: VectorStore, name: str, fingerprint: str, preference: bool = False) -> bool:
    """Return whether a vector of that name exists for a model with this fingerprint.

    As a `preference`, it must lead from one modality to the other.
    """
    try:
        vector = store.get(name)
    except (VectorError, OSError):
        return False
    return vector.fingerprint == fingerprint and (vector.positive is not None or not preference)


def lookup(value: SteeringVector | str, param: str, store: VectorStore) -> SteeringVector:
    """Return the vector of that name; raises VectorError, or PinError for another digest, naming the field."""
    if isinstance(value, SteeringVector):
        return value
    try:
        return store.get(value)
    except VectorError as error:
        raise VectorError(str(error), param=param, code=error.code) from error
    except PinError as error:
        raise PinError(f"'{param}': {error}", param=param, code=error.code) from error
