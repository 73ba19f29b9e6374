"""The encoding of an engine core's messages as bytes, for other processes.

Only data is sent, and only data is built from what is received: numbers, texts, tensors, pictures, errors, and the
dataclasses, named tuples, enums and options of the modules in which messages, interventions, readouts and recorders are
defined, by their constructors, which validate their arguments; and those of the modules of `more` kinds, on which writer
and reader agree. A pickle would run whatever code its sender likes.
"""

from __future__ import annotations

import builtins
import dataclasses
import io
import itertools
import json
import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel

from steering import errors
from steering.errors import Fault, RequestError, SteeringError
from steering.grammar.grammar import Grammar
from steering.logprobs import TopLogprobs
from steering.messages.messages import Add
from steering.model.images import Inputs, Picture, is_text_input
from steering.prompt.fitting import Shrunk
from steering.prompt.layout import Prompt
from steering.prompt.rendering import TemplateOptions
from steering.protocol import intervention, readout, recorder
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request
from steering.protocol.sequence import Spec
from steering.protocol.signals import Signal, StateChoice
from steering.runner.contrastive import TwinReport
from steering.timing import Timing
from steering.vectors.sparse import SparseDictionary
from steering.vectors.vector import SteeringVector

KINDS = (
    Add, Diagnose, Grammar, Picture, Prompt, Request, Shrunk, Signal, SparseDictionary, Spec, StateChoice, SteeringVector,
    TemplateOptions, Timing, TopLogprobs, TwinReport,
)  # fmt: skip
"""Kinds of data in messages beside those of interventions, readouts and recorders."""

_SCALARS = {type(None), bool, int, float, str}
_RAW = ("L", "RGB", "RGBA")
"""Picture modes whose pixels are sent raw; others have a palette or the like, and are sent as PNG."""
_HEAD = 8


def written(value: Any, more: Sequence[type] = ()) -> bytes:
    """Return a message as bytes; raise RequestError for a value that cannot be sent."""
    return b"".join(parts(value, more))


def parts(value: Any, more: Sequence[type] = (), shared: Shared | None = None) -> list[bytes]:
    """Return the bytes of `written` in pieces, of which those after the first may be large.

    shared: the state of a stream of messages, which must be read in the order in which they were written.
    """
    writer = _Writer(more, shared)
    try:
        head = json.dumps([writer.plain(value), [len(blob) for blob in writer.blobs]]).encode()
    except BaseException:
        if shared is not None:
            shared.forget()  # some values may have been marked as sent
        raise
    if shared is not None:
        shared.mark_sent()
    return [len(head).to_bytes(_HEAD, "big") + head, *writer.blobs]


def read(data: bytes | bytearray, more: Sequence[type] = (), shared: Shared | None = None) -> Any:
    """Return the value that was written; raise ValueError for anything else. shared: the state of its stream."""
    end = _HEAD + int.from_bytes(data[:_HEAD], "big")
    value, sizes = json.loads(data[_HEAD:end])
    view, blobs = memoryview(data), []
    for size in sizes:
        blobs.append(view[end : end + size])
        end += size
    return _Reader(more, blobs, shared).restore(value)


class Shared:
    """The steering vectors and pictures that one end of a stream has sent to the other, and received.

    They are large and recur. Once sent, a value is referred to by its number, until its sender tells the other end to drop
    it: the least recently used, where there are more than `MOST`, or more than `BYTES` bytes.
    """

    MOST, BYTES = 256, 128 * 2**20
    KINDS = (SteeringVector, Picture, Image.Image)

    def __init__(self) -> None:
        self._sent: OrderedDict[int, _Sent] = OrderedDict()  # by id, which stays unique while the value is kept
        self._bytes = 0
        self._numbers = itertools.count()
        self._gone: list[int] = []
        self.received: dict[int, Any] = {}

    def reference(self, value: Any) -> tuple[int, list[int] | None] | None:
        """Return a value's number and, if it is new, the numbers that the other end has to drop.

        None for a value that is too large to be kept. It counts as sent once `mark_sent` is called.
        """
        if (sent := self._sent.get(id(value))) is not None:
            self._sent.move_to_end(id(value))
            return sent.number, None
        if (size := _bytes(value)) > self.BYTES:
            return None
        while self._sent and (len(self._sent) >= self.MOST or self._bytes + size > self.BYTES):
            self._let_go(next(iter(self._sent)))
        self._sent[id(value)] = entry = _Sent(next(self._numbers), value, size)
        self._bytes += size
        return entry.number, [*self._gone]

    def mark_sent(self) -> None:
        """Count the values of a message as sent."""
        self._gone.clear()

    def receive(self, number: int, gone: Sequence[int], first: Any) -> Any:
        """Record a value from the other end, dropping the numbers that are gone."""
        for dropped in gone:
            self.received.pop(dropped, None)
        self.received[number] = first
        return first

    def forget(self) -> None:
        """Forget all sent values, so that they are sent whole again."""
        for key in list(self._sent):
            self._let_go(key)

    def _let_go(self, key: int) -> None:
        entry = self._sent.pop(key)
        self._bytes -= entry.bytes
        self._gone.append(entry.number)


class _Sent(NamedTuple):
    number: int
    value: Any
    bytes: int


def _bytes(shared: Any) -> int:
    """Return the size in bytes of an image (Pillow takes four a pixel), or of an object's tensors, also in mappings."""
    if isinstance(shared, Image.Image):
        return 4 * shared.width * shared.height
    values = [
        part for value in vars(shared).values() for part in (value.values() if isinstance(value, Mapping) else [value])
    ]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


class _Kinds:
    """The kinds of data that may be sent, with `more` than usual; most messages hold none and never look."""

    def __init__(self, more: Sequence[type]):
        self._more = more

    @cached_property
    def _modules(self) -> frozenset[str]:
        return _modules(self._more)


class _Writer(_Kinds):
    """Writes large or binary values to blobs, and the rest as JSON."""

    def __init__(self, more: Sequence[type], shared: Shared | None):
        super().__init__(more)
        self.blobs: list[bytes] = []
        self._shared = shared

    def plain(self, value: Any) -> Any:
        """Return a value as JSON."""
        if type(value) in _SCALARS:
            return value
        reference = (
            self._shared.reference(value) if self._shared is not None and isinstance(value, Shared.KINDS) else None
        )
        if reference is None:
            return self._encode(value)
        number, gone = reference
        return {"known": number} if gone is None else {"known": number, "gone": gone, "first": self._encode(value)}

    def _encode(self, value: Any) -> Any:
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            parts = list(value) if _SCALARS.issuperset(map(type, value)) else [self.plain(member) for member in value]
            return {"tuple": parts} if isinstance(value, tuple) else parts
        if isinstance(value, array):
            return {"array": value.typecode, "blob": self._blob(value.tobytes())}
        if isinstance(value, BaseException):
            return {"error": self.plain(error_to_data(value))}
        if isinstance(value, Mapping):
            return {"dict": [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        if isinstance(value, bool | int | float | str) and not isinstance(value, Enum):
            return value
        if isinstance(value, bytes):
            return {"bytes": self._blob(value)}
        if isinstance(value, torch.Tensor):
            tensor = value.detach().to("cpu").contiguous()
            raw = tensor.flatten().view(torch.uint8).numpy().tobytes()
            dtype = str(tensor.dtype).removeprefix("torch.")
            return {"tensor": dtype, "shape": list(tensor.shape), "blob": self._blob(raw)}
        if isinstance(value, Image.Image):
            raw = value.tobytes() if value.mode in _RAW else _png(value)
            return {"image": value.mode, "size": list(value.size), "blob": self._blob(raw)}
        if isinstance(value, Set):
            return {"set": [self.plain(member) for member in sorted(value, key=repr)]}
        if isinstance(value, Sequence) and not hasattr(value, "_fields"):
            return [self.plain(member) for member in value]
        if isinstance(value, Prompt):  # its inputs hold the pictures' tensors a second time
            texts = {name: value.inputs[name] for name in value.inputs if is_text_input(name)}
            value = dataclasses.replace(value, inputs=texts)
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if (kind := _kind(name, self._modules)) is None:
            raise RequestError(f"{type(value).__name__} cannot be sent to another process.")
        if issubclass(kind, Enum):
            return {"member": name, "of": value.name}
        fields = {key: self.plain(getattr(value, key)) for key in _fields(kind)}
        return {"made": name, "of": fields}

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1


class _Reader(_Kinds):
    """Builds values from JSON and blobs."""

    def __init__(self, more: Sequence[type], blobs: Sequence[memoryview], shared: Shared | None):
        super().__init__(more)
        self._blobs, self._shared = blobs, shared

    def restore(self, value: Any) -> Any:
        """Return the value of some JSON."""
        if isinstance(value, list):
            return value if _SCALARS.issuperset(map(type, value)) else [self.restore(member) for member in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"tuple": list(members)}:
                return tuple(self.restore(members))
            case {"made": str(name), "of": dict(fields)} if (kind := _kind(name, self._modules)) is not None:
                built = kind(**{key: self.restore(item) for key, item in fields.items()})
                return (
                    dataclasses.replace(built, inputs=Inputs(built.inputs, built.pictures)) if kind is Prompt else built
                )
            case {"member": str(name), "of": str(member)} if (kind := _kind(name, self._modules)) is not None:
                return kind[member]
            case {"error": list(parts)}:
                return error_from_data(*self.restore(parts))
            case {"array": ("d" | "q") as code, "blob": int(blob)}:
                return array(code, bytes(self._blobs[blob]))
            case {"known": int(number), "gone": list(gone), "first": dict(first)} if self._shared is not None:
                return self._shared.receive(number, gone, self.restore(first))
            case {"known": int(number)} if self._shared is not None and number in self._shared.received:
                return self._shared.received[number]
            case {"dict": list(pairs)}:
                return {self.restore(key): self.restore(item) for key, item in pairs}
            case {"set": list(members)}:
                return frozenset(self.restore(members))
            case {"bytes": int(blob)}:
                return bytes(self._blobs[blob])
            case {"tensor": str(dtype), "shape": list(shape), "blob": int(blob)}:
                if not self._blobs[blob]:
                    return torch.empty(shape, dtype=getattr(torch, dtype))
                raw = torch.from_numpy(np.frombuffer(self._blobs[blob], np.uint8).copy())
                return raw.view(getattr(torch, dtype)).view(shape)
            case {"image": str(mode), "size": list(size), "blob": int(blob)}:
                if mode in _RAW:
                    return Image.frombytes(mode, tuple(size), self._blobs[blob])
                return Image.open(io.BytesIO(self._blobs[blob]))
        raise ValueError(f"What was received is no part of a request: {str(value)[:200]}.")


def error_to_data(error: BaseException) -> list[Any]:
    """Return an error as data: its class name, its message and its fields."""
    fields = {name: value for name, value in vars(error).items() if type(value) in _SCALARS}
    return [type(error).__name__, str(error), fields]


def error_from_data(name: str, text: str, fields: Mapping[str, Any]) -> Exception:
    """Return the error of some data; a Fault that names it where it is neither Helmsight's nor Python's own."""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return Fault(f"{name}: {text}")
    if not issubclass(kind, SteeringError):
        return kind(text)
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    vars(error).update(fields)
    return error


def _modules(more: Sequence[type]) -> frozenset[str]:
    """Return the modules whose kinds may be sent."""
    interventions = [kind for pair in intervention.REGISTRY.values() for kind in pair if kind is not None]
    data = [kind for spec, _ in intervention.REGISTRY.values() for kind in spec.data]
    readouts = map(type, readout.REGISTRY.values())
    return _modules_of((*more, *interventions, *data, *readouts, *recorder.REGISTRY.values()))


@lru_cache(maxsize=64)
def _modules_of(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset(kind.__module__ for kind in (*KINDS, *kinds))


@lru_cache(maxsize=1024)
def _kind(name: str, modules: frozenset[str]) -> Any:
    """Return a class of data of one of these modules; None for anything else."""
    module, _, qualified = name.partition(":")
    if module not in modules:
        return None
    kind = vars(sys.modules[module]).get(qualified)
    if not isinstance(kind, type):
        return None
    data = dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel | Enum) or hasattr(kind, "_fields")
    return kind if data else None


@lru_cache(maxsize=1024)
def _fields(kind: Any) -> list[str]:
    if issubclass(kind, BaseModel):
        return list(kind.model_fields)
    if issubclass(kind, tuple):
        return list(kind._fields)
    return [field.name for field in dataclasses.fields(kind) if field.init]


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
