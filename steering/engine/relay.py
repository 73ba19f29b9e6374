"""Requests as bytes, for the other processes that run a model together with this one.

Data alone is sent, and of what is received data is made alone: numbers, texts, tensors, pictures, and the dataclasses and
options of the modules in which requests and interventions are defined, by their constructors, which check what they are
given. A pickle would run whatever code its sender likes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel

from steering.errors import RequestError
from steering.grammar.grammar import Grammar
from steering.protocol import intervention
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request
from steering.tools.tools import Tools
from steering.vectors.vector import SteeringVector

_RAW = ("L", "RGB", "RGBA")
"""Modes of pictures whose pixels say all; others have a palette, or the like, and are sent as PNG."""
_HEAD = 8


def written(value: Any) -> bytes:
    """A request, or what consists of the same parts. Raises RequestError for what is neither."""
    blobs: list[bytes] = []
    head = json.dumps([_plain(value, blobs), [len(blob) for blob in blobs]]).encode()
    return b"".join([len(head).to_bytes(_HEAD, "big"), head, *blobs])


def read(data: bytes) -> Any:
    """What was written; raises ValueError for anything else."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "big")
    value, sizes = json.loads(data[_HEAD:end])
    blobs = []
    for size in sizes:
        blobs.append(data[end : end + size])
        end += size
    return _made(value, blobs)


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """A value as JSON; what is large, or no text, is put among the blobs."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        blobs.append(value)
        return {"bytes": len(blobs) - 1}
    if isinstance(value, torch.Tensor):
        tensor = value.detach().to("cpu").contiguous()
        blobs.append(tensor.flatten().view(torch.uint8).numpy().tobytes())
        return {"tensor": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "blob": len(blobs) - 1}
    if isinstance(value, Image.Image):
        blobs.append(value.tobytes() if value.mode in _RAW else _png(value))
        return {"image": value.mode, "size": list(value.size), "blob": len(blobs) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key, blobs), _plain(one, blobs)] for key, one in value.items()]}
    if isinstance(value, Set):
        return {"set": [_plain(one, blobs) for one in sorted(value)]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one, blobs) for one in value]}
    if isinstance(value, Sequence):
        return [_plain(one, blobs) for one in value]
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    if (kind := _kind(name)) is None:
        raise RequestError(f"{type(value).__name__} cannot be sent to the other processes that run this model.")
    fields = {key: _plain(getattr(value, key), blobs) for key in _fields(kind)}
    return {"made": name, "of": fields}


def _made(value: Any, blobs: Sequence[bytes]) -> Any:
    if isinstance(value, list):
        return [_made(one, blobs) for one in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"bytes": int(blob)}:
            return blobs[blob]
        case {"tensor": str(dtype), "shape": list(shape), "blob": int(blob)}:
            raw = torch.from_numpy(np.frombuffer(blobs[blob], np.uint8).copy())
            return raw.view(getattr(torch, dtype)).view(shape)
        case {"image": str(mode), "size": list(size), "blob": int(blob)}:
            if mode in _RAW:
                return Image.frombytes(mode, tuple(size), blobs[blob])
            return Image.open(io.BytesIO(blobs[blob]))
        case {"dict": list(pairs)}:
            return {_made(key, blobs): _made(one, blobs) for key, one in pairs}
        case {"set": list(members)}:
            return frozenset(_made(one, blobs) for one in members)
        case {"tuple": list(members)}:
            return tuple(_made(one, blobs) for one in members)
        case {"made": str(name), "of": dict(fields)} if (kind := _kind(name)) is not None:
            return kind(**{key: _made(one, blobs) for key, one in fields.items()})
    raise ValueError(f"What was received is no part of a request: {str(value)[:200]}.")


def _kind(name: str) -> Any:
    """A dataclass or options of one of the modules that requests are of; None for anything else."""
    module, _, qualified = name.partition(":")
    of = (Request, Diagnose, Grammar, Tools, SteeringVector, *(asked for asked, _ in intervention.REGISTRY.values()))
    if module not in {kind.__module__ for kind in of}:
        return None
    found = vars(sys.modules[module]).get(qualified)
    data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, BaseModel))
    return found if data else None


def _fields(kind: Any) -> list[str]:
    if issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
