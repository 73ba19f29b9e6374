"""Image features: each image is encoded once, several requests' new ones in one call, and kept by content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers.utils import ModelOutput

TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Processor outputs with one value a token; everything else describes the images."""

PIXELS = "pixel_values"
"""How the names of those begin that are what pictures look like."""

BLANKS = 4096
"""Pictures of which it is known how large their features are."""

Encode = Callable[[Mapping[str, torch.Tensor]], Any]
"""From the processor's tensors to what the model's `get_image_features` returns."""


@dataclass
class Features(ModelOutput):
    """What a model's `get_image_features` returns, as far as it is used: of each picture (tokens, d)."""

    pooler_output: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Picture:
    """What the processor made of one image, or of one tile. key: a hash of the tensors, which are on the CPU."""

    key: bytes
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Picture:
        hasher = hashlib.sha256()
        for name in sorted(tensors):
            value = tensors[name].contiguous()
            hasher.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            hasher.update(value.flatten().view(torch.uint8).numpy().data)
        return cls(hasher.digest(), tensors)

    @classmethod
    def join(cls, pictures: Iterable[Picture]) -> Picture:
        """Several pictures that are encoded, and kept, as one."""
        pictures = list(pictures)
        key = hashlib.sha256(b"".join(picture.key for picture in pictures)).digest()
        return pictures[0] if len(pictures) == 1 else cls(key, joined(pictures))

    @property
    def values(self) -> int:
        """The size of what it looks like: its colour values, those of padding included."""
        return sum(value.numel() for name, value in self.tensors.items() if name.startswith(PIXELS))

    @property
    def shape(self) -> tuple[object, ...]:
        """Equal for pictures that can be encoded in one call: they differ only in their first dimension."""
        return tuple((name, value.dtype, *value.shape[1:]) for name, value in sorted(self.tensors.items()))


def joined(pictures: Sequence[Picture]) -> dict[str, torch.Tensor]:
    """The processor's tensors of several pictures, which `divide` made of them."""
    return dict(Inputs({}, pictures))


class Inputs(Mapping[str, torch.Tensor]):
    """A processor's tensors of a prompt. Those of several pictures are put together where one is asked for: once a model's
    features of them are known, nobody does."""

    def __init__(self, text: Mapping[str, torch.Tensor], pictures: Sequence[Picture]):
        own = pictures[0].tensors if pictures else {}
        self._made = {name: one for name, one in text.items() if name not in own}
        self._pictures = pictures
        self._names = dict.fromkeys([*self._made, *own])

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._made and name in self._names:
            parts = [picture.tensors[name] for picture in self._pictures]
            self._made[name] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def divide(inputs: Mapping[str, torch.Tensor]) -> tuple[Picture, ...]:
    """The pictures in a processor's output, none without images; one of all images where they cannot be told apart.

    The first dimension of every tensor counts images or tiles, or, where the images have grids, patches.
    """
    tensors = {name: value for name, value in inputs.items() if name not in TEXT_INPUTS}
    if not tensors:
        return ()
    grids = tensors.get("image_grid_thw")
    sizes = [1] * min(len(value) for value in tensors.values()) if grids is None else grids.prod(-1).tolist()
    parts: dict[str, Sequence[torch.Tensor]] = {}
    for name, value in tensors.items():
        if len(value) == len(sizes):
            parts[name] = value.split(1)
        elif len(value) == sum(sizes):
            parts[name] = value.split(sizes)
        else:
            return (Picture.of(tensors),)
    return tuple(Picture.of({name: part[i] for name, part in parts.items()}) for i in range(len(sizes)))


class ImageCache:
    """Features by content, the least recently used let go first, bounded in bytes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._blanks: OrderedDict[bytes, Any] = OrderedDict()
        self._ahead: dict[bytes, Any] = {}  # of one prompt, what was encoded before it is embedded
        self._separable = True  # whether the model's features can be told apart by picture

    def stats(self) -> dict[str, int]:
        """What is counted, and the bytes kept now."""
        counts = {"hits": self.hits, "misses": self.misses, "bytes": self.bytes}
        return {f"image_cache_{name}": count for name, count in counts.items()}

    def missing(self, pictures: Sequence[Picture]) -> list[Picture]:
        """Return a prompt's new pictures, each once; one for all where they cannot be told apart."""
        if not self._separable:
            pictures = (Picture.join(pictures),) if pictures else ()
        new = {one.key: one for one in pictures if one.key not in self._entries and one.key not in self._ahead}
        return list(new.values())

    def encode_next(self, encode: Encode, pictures: Sequence[Picture], values: float = 0) -> int:
        """Encode the first new ones of a prompt's pictures in one call, for the `get` that follows: at least one, and as
        many of its shape as have together no more `values` than given. Returns how many values, 0 where there is none."""
        keys = {picture.key for picture in pictures}
        self._ahead = {key: features for key, features in self._ahead.items() if key in keys}
        missing = self.missing(pictures) if self._separable else []
        if not missing:
            return 0
        alike = [picture for picture in missing if picture.shape == missing[0].shape]
        sums = accumulate(picture.values for picture in alike)
        chosen = alike[: max(1, sum(total <= values for total in sums))]
        parts = _separate(encode(joined(chosen)), len(chosen))
        if parts is None:
            return 0  # `get` finds that out, too
        self.misses += len(chosen)
        for picture, part in zip(chosen, parts, strict=True):
            self._ahead[picture.key] = part
            self._keep(picture.key, part)
        return sum(picture.values for picture in chosen)

    def get(
        self, encode: Encode, prompts: Sequence[Sequence[Picture]], unseen: Collection[bytes] = frozenset()
    ) -> list[Any]:
        """The features of each prompt's pictures; what is new is encoded, as far as it has one shape in one call. Zeros will
        do of pictures whose keys are `unseen`."""
        if not self._separable:
            unseen = {Picture.join(some).key for some in prompts if all(one.key in unseen for one in some)}
            prompts = [(Picture.join(pictures),) for pictures in prompts]
        found: dict[bytes, Any] = {}
        missing: dict[tuple[object, ...], dict[bytes, Picture]] = {}
        for picture in (picture for pictures in prompts for picture in pictures):
            if picture.key in self._ahead:
                found[picture.key] = self._ahead[picture.key]
            elif picture.key in self._entries:
                self.hits += 1
                self._entries.move_to_end(picture.key)
                found[picture.key] = self._entries[picture.key][0]
            elif picture.key in unseen and picture.key in self._blanks:
                found[picture.key] = self._blanks[picture.key]
            else:
                shape = picture.shape if self._separable else (picture.key,)
                missing.setdefault(shape, {})[picture.key] = picture
        for pictures in missing.values():
            encoded = encode(joined(list(pictures.values())))
            parts = _separate(encoded, len(pictures)) if self._separable else [encoded]
            if parts is None:  # found out at the first image that a model sees
                self._separable = False
                return self.get(encode, prompts, unseen)
            self.misses += len(pictures)
            for key, part in zip(pictures, parts, strict=True):
                found[key] = part
                self._keep(key, part)
        return [_join_features([found[picture.key] for picture in pictures]) for pictures in prompts]

    def _keep(self, key: bytes, features: Any) -> None:
        self._blanks[key] = _blank(features)
        if len(self._blanks) > BLANKS:
            self._blanks.popitem(last=False)
        size = _tensor_bytes(features)
        if size > self.capacity:
            return
        self._entries[key] = (features, size)
        self.bytes += size
        while self.bytes > self.capacity:
            self.bytes -= self._entries.popitem(last=False)[1][1]


def _separate(output: Any, count: int) -> list[Any] | None:
    """The features of each of `count` pictures as outputs of their own, None where the output does not tell.

    Besides the features themselves only those of DeepStack are used by the models; both are copied, or one picture would
    keep the memory of all.
    """
    pooled, deep = output.pooler_output, output.get("deepstack_features")
    if len(pooled) != count:
        return None
    layers: list[Sequence[torch.Tensor]] = []
    for layer in deep or ():
        lengths = [len(part) for part in pooled]
        if sum(lengths) != len(layer):
            return None
        layers.append(layer.split(lengths))
    separate = []
    for i in range(count):
        part = pooled[i : i + 1]
        part = part.clone() if isinstance(part, torch.Tensor) else type(part)(tensor.clone() for tensor in part)
        fields = {"deepstack_features": [layer[i].clone() for layer in layers]} if deep else {}
        separate.append(type(output)(pooler_output=part, **fields))
    return separate


def _join_features(parts: Sequence[Any]) -> Any:
    """The inverse of `_separate`."""
    if len(parts) == 1:
        return parts[0]
    pooled = [part.pooler_output for part in parts]
    joined = torch.cat(pooled) if isinstance(pooled[0], torch.Tensor) else sum(pooled[1:], pooled[0])
    deep = [part.get("deepstack_features") for part in parts]
    fields = {"deepstack_features": [torch.cat(layer) for layer in zip(*deep, strict=True)]} if deep[0] else {}
    return type(parts[0])(pooler_output=joined, **fields)


def _blank(value: Any) -> Any:
    """Zeros in the place of features, which take no memory."""
    if isinstance(value, torch.Tensor):
        return value.new_zeros(()).expand(value.shape)
    if isinstance(value, Mapping):
        return type(value)(**{name: _blank(item) for name, item in value.items()})
    return type(value)(map(_blank, value)) if isinstance(value, (list, tuple)) else value


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(item) for item in value)
    return 0
