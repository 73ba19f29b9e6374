"""Hooks split into their tensors, which are a compiled step's arguments, and the rest, for which the step is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from steering.model.mllm import MLLM

PLAIN = (type(None), bool, int, float, str)


class Foreign(TypeError):
    """A hook holds a value that is neither tensor nor constant."""


class Leaf(NamedTuple):
    """The place of a tensor. number: its index."""

    number: int


class Node(NamedTuple):
    """An object, a list, a dictionary or a tuple: its class, and its parts by name."""

    kind: type
    names: tuple[Any, ...]
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Pattern:
    """The structure of a value without the contents of its tensors; values of equal patterns are computed alike.

    tree: the value, with a `Leaf` for each tensor. tensors: dtype and number of axes of each.
    """

    tree: Any
    tensors: tuple[tuple[torch.dtype, int], ...]

    def text(self) -> str:
        """Return the pattern as text, equal in every process."""
        return f"{_words(self.tree)} {[(str(dtype), axes) for dtype, axes in self.tensors]}"


def taken_apart(value: Any) -> tuple[Pattern, list[torch.Tensor]]:
    """Return a value's pattern, and its tensors, each once; raise Foreign."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def leaf(tensor: torch.Tensor) -> Leaf:
        number = places.setdefault(id(tensor), len(tensors))
        if number == len(tensors):
            tensors.append(tensor)
        return Leaf(number)

    tree = _tree(value, leaf)
    return Pattern(tree, tuple((tensor.dtype, tensor.ndim) for tensor in tensors)), tensors


Sizes = tuple[int | None, ...]
"""The sizes of a tensor, None for each that may vary."""


def fixed_sizes(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[Sizes, ...]:
    """Return the sizes that the tensors of two examples have in common; None for each that differs."""
    return tuple(
        tuple(a if a == b else None for a, b in zip(tensor.shape, other_tensor.shape, strict=True))
        for tensor, other_tensor in zip(tensors, others, strict=True)
    )


class TreeSpec:
    """Values of one shape, read and written without checks of what is always the same, because a step is short.

    sizes: of each tensor. Nothing else checks them, and code compiled for other sizes would read beyond a tensor's end.
    """

    def __init__(self, shape: Pattern, sizes: Sequence[Sizes]):
        self._shape = shape
        self._expected = [(*kind, size) for kind, size in zip(shape.tensors, sizes, strict=True)]
        self._read = _reader(shape.tree)

    def tensors(self, value: Any) -> list[torch.Tensor] | None:
        """Return the tensors that a value holds, each once; None where its shape or its tensors' sizes differ."""
        tensors: list[torch.Tensor] = []
        if not self._read(value, tensors) or len(tensors) != len(self._expected):
            return None
        for tensor, (dtype, axes, sizes) in zip(tensors, self._expected, strict=True):
            if tensor.dtype is not dtype or tensor.ndim != axes:
                return None
            if any(size not in (None, actual) for actual, size in zip(tensor.shape, sizes, strict=True)):
                return None
        return tensors

    @staticmethod
    def change(values: list[Any], changes: list[tuple[int, str, Any]], tensors: list[torch.Tensor]) -> None:
        """Apply `changes` to a list of objects, with these tensors."""
        for number, name, part in changes:
            vars(values[number])[name] = put_together(part, tensors)

    def changes(self, pattern: Any) -> list[tuple[int, str, Any]]:
        """Return how a list of objects of this shape has to change to become the tree `pattern`.

        For each changed attribute: the object's number, the attribute's name, and its tree.
        """
        return [
            (number, name, part)
            for number, (before, after) in enumerate(zip(self._shape.tree.parts, pattern.parts, strict=True))
            for name, part in zip(after.names, after.parts, strict=True)
            if name not in before.names or before.parts[before.names.index(name)] != part
        ]


class Bound:
    """A list of objects whose tensors stay the same, so that they are looked up only once.

    The lookup is in their original state, because `TreeSpec.change` changes them.
    """

    def __init__(self, values: list[Any]):
        self.values = values
        self._attributes_before = [dict(vars(value)) for value in values]
        self._tensors_by_spec: WeakKeyDictionary[TreeSpec, list[torch.Tensor] | None] = WeakKeyDictionary()

    def tensors(self, tree_spec: TreeSpec) -> list[torch.Tensor] | None:
        """Return the tensors as `TreeSpec.tensors`."""
        if tree_spec not in self._tensors_by_spec:
            self.reset()
            self._tensors_by_spec[tree_spec] = tree_spec.tensors(self.values)
        return self._tensors_by_spec[tree_spec]

    def reset(self) -> None:
        """Restore the values' original state."""
        for value, were in zip(self.values, self._attributes_before, strict=True):
            vars(value).clear()
            vars(value).update(were)


def put_together(tree: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a new value with these tensors."""
    if type(tree) is Leaf:
        return tensors[tree.number]
    if type(tree) is not Node:
        return tree
    kind, names, parts = tree
    values = [put_together(part, tensors) for part in parts]
    if kind is list:
        return values
    if kind is dict:
        return dict(zip(names, values, strict=True))
    if issubclass(kind, tuple):
        return tuple(values) if kind is tuple else kind(*values)
    value = object.__new__(kind)
    value.__dict__.update(zip(names, values, strict=True))
    return value


def as_json(tree: Any) -> Any:
    """Return a tree as JSON, which `of_json` reads."""
    if type(tree) is Leaf:
        return {"hole": tree.number}
    if type(tree) is Node:
        names, parts = map(as_json, tree.names), map(as_json, tree.parts)
        return {"kind": _name(tree.kind), "names": [*names], "parts": [*parts]}
    return {"torch": str(tree)} if isinstance(tree, torch.device | torch.dtype) else tree


def of_json(words: Any, kinds: Iterable[type]) -> Any:
    """Return the tree that was written, with objects of these kinds alone; raise KeyError for others."""
    kinds_by_name = {_name(kind): kind for kind in (*kinds, list, tuple, dict)}

    def read(content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        if "hole" in content:
            return Leaf(int(content["hole"]))
        if "torch" in content:
            dtype = getattr(torch, str(content["torch"]).removeprefix("torch."), None)
            return dtype if isinstance(dtype, torch.dtype) else torch.device(content["torch"])
        return Node(
            kinds_by_name[content["kind"]], tuple(map(read, content["names"])), tuple(map(read, content["parts"]))
        )

    return read(words)


def kinds_of(tree: Any) -> set[type]:
    """Return the kinds of objects in a tree."""
    return {tree.kind}.union(*map(kinds_of, tree.parts)) if type(tree) is Node else set()


def _reader(tree: Any) -> Callable[[Any, list[torch.Tensor]], bool]:
    """Return a function that appends a value's tensors to a list, and returns True where the value has this tree."""
    if type(tree) is Leaf:
        number = tree.number

        def leaf(value: Any, tensors: list[torch.Tensor]) -> bool:
            if number < len(tensors):
                return value is tensors[number]
            tensors.append(value)
            return isinstance(value, torch.Tensor)

        return leaf
    if type(tree) is not Node:
        return lambda value, tensors: type(value) is type(tree) and value == tree
    kind, names, readers = tree.kind, tree.names, [*map(_reader, tree.parts)]
    plain = issubclass(kind, list | tuple | dict)

    def node(value: Any, tensors: list[torch.Tensor]) -> bool:
        if type(value) is not kind:
            return False
        attributes: Any = value if plain else vars(value)
        parts = list(attributes.values()) if isinstance(attributes, dict) else attributes
        if len(parts) != len(readers) or (isinstance(attributes, dict) and tuple(attributes) != names):
            return False
        for read, part in zip(readers, parts, strict=True):  # noqa: SIM110
            if not read(part, tensors):
                return False
        return True

    return node


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _tree(value: Any, leaf: Callable[[torch.Tensor], Leaf]) -> Any:
    kind = type(value)
    if kind in PLAIN or isinstance(value, torch.device | torch.dtype | MLLM):  # a step is of one model
        return value
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if kind is dict:
        names, values = tuple(value), tuple(value.values())
    elif isinstance(value, list | tuple):
        names, values = (), tuple(value)
    elif type(getattr(value, "__dict__", None)) is dict and not callable(value):
        names, values = tuple(vars(value)), tuple(vars(value).values())
    else:
        raise Foreign(f"a {kind.__qualname__}")
    return Node(kind, names, tuple(_tree(value, leaf) for value in values))


def _words(tree: Any) -> str:
    if type(tree) is Leaf:
        return f"Hole(number={tree.number})"  # as stored packages have it
    if type(tree) is Node:
        return f"{_name(tree.kind)}{tree.names}({', '.join(map(_words, tree.parts))})"
    return repr(tree)
