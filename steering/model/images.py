"""Image features: each image is encoded once, new ones of several requests in one call, and cached by content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers.utils import ModelOutput

from steering.devices import to_device
from steering.form import MixedForms, OneForm
from steering.vision.geometry import GRID

PIXELS = "pixel_values"
"""The prefix of the names of processor outputs that are pixels."""

CPU = torch.device("cpu")

BLANKS = 4096
"""The number of pictures whose feature sizes are remembered."""

STATES = frozenset({"last_hidden_state", "hidden_states", "attentions"})
"""The fields of an encoder's output besides features; wrappers read them only where there are no features."""

Encode = Callable[[Mapping[str, torch.Tensor]], Any]
"""A function from the processor's tensors to the result of the model's `get_image_features`."""


@dataclass
class Features(ModelOutput):
    """The used part of the output of a model's `get_image_features`.

    pooler_output: of each picture (tokens, d), or one tensor of all. deepstack_features: per layer (tokens, d) of each
    picture, or (tokens of all pictures, d), where a model has them.
    """

    pooler_output: Any = None
    deepstack_features: Any = None

    @staticmethod
    def whole(output: ModelOutput) -> ModelOutput:
        """Copy an output that does not separate its pictures, without the vision encoder's states that no wrapper reads."""
        unread = STATES if output.get("pooler_output") is not None else STATES - {"last_hidden_state"}
        return _changed(output, lambda name, value: None if name in unread else value)

    @classmethod
    def are_all_of(cls, output: ModelOutput) -> bool:
        """Return whether an output has these features and nothing else that a wrapper may read."""
        return output.get("pooler_output") is not None and not output.keys() - STATES - {*cls.__dataclass_fields__}


@dataclass(frozen=True)
class PictureFeatures:
    """The features of one picture, in one form, whether the vision encoder ran eagerly or compiled.

    pooled: (tokens, d). deep: (tokens, d) for each of DeepStack's layers. Both own their memory; a view would keep the
    features of all pictures that were encoded in the same call.
    """

    pooled: torch.Tensor
    deep: tuple[torch.Tensor, ...] = ()

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.pooled, *self.deep)

    @classmethod
    def separate(cls, output: Any, count: int) -> list[PictureFeatures] | None:
        """Split an output by its `count` pictures; None where it does not separate them, or where there is more in it."""
        if not Features.are_all_of(output):
            return None
        pooled, deep = output.pooler_output, output.get("deepstack_features") or ()
        if len(pooled) != count:
            return None
        lengths = [len(part) for part in pooled]
        whole = [isinstance(layer, torch.Tensor) for layer in deep]
        if any(len(layer) != (sum(lengths) if joint else count) for layer, joint in zip(deep, whole, strict=True)):
            return None
        layers = [layer.split(lengths) if joint else layer for layer, joint in zip(deep, whole, strict=True)]
        return [cls(_copy_of(pooled[at]), tuple(_copy_of(layer[at]) for layer in layers)) for at in range(count)]

    @staticmethod
    def join(parts: Sequence[PictureFeatures], stacked: bool, whole: bool = True) -> Features:
        """Join the features of a prompt's pictures as its model takes them: `stacked` in one tensor, or as a sequence.

        whole: it takes those of DeepStack's layers in one tensor.
        """
        pooled = tuple(part.pooled for part in parts)
        deep = [torch.cat(layer) if whole else layer for layer in zip(*(part.deep for part in parts), strict=True)]
        return Features(torch.stack(pooled) if stacked else pooled, deep or None)


KeptFeatures: TypeAlias = PictureFeatures | ModelOutput
"""An entry of the cache: the features of a picture, or of all pictures of a prompt where they cannot be separated."""


class PixelTable(NamedTuple):
    """A processor's pixel for each byte, (channels, 256). The processor repeats each picture for `frames` frames."""

    values: torch.Tensor
    frames: int

    def pixels(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the processor's pixels (patches, channels * frames * n) of raw ones (patches, channels, n)."""
        tables = to_device(self.values, raw.device)
        channels = [
            table.index_select(0, part.flatten().int()).view(part.shape)
            for table, part in zip(tables, raw.unbind(1), strict=True)
        ]
        return torch.stack(channels, 1)[:, :, None].expand(-1, -1, self.frames, -1).flatten(1)


@dataclass(frozen=True)
class Picture:
    """The processor's tensors of one image, or of one tile, on the CPU.

    key: a hash of the tensors. table: what turns raw pixels, bytes (patches, channels, n), into the processor's; None where
    they are the processor's already.
    """

    key: bytes
    tensors: Mapping[str, torch.Tensor]
    table: PixelTable | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], table: PixelTable | None = None) -> Picture:
        hasher = hashlib.sha256()
        for name in sorted(tensors):
            value = tensors[name].contiguous()
            hasher.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            hasher.update(value.flatten().view(torch.uint8).numpy().data)
        return cls(hasher.digest(), tensors, table)

    @classmethod
    def join(cls, pictures: Iterable[Picture]) -> Picture:
        """Join several pictures into one that is encoded and cached as a whole."""
        pictures = list(pictures)
        key = hashlib.sha256(b"".join(picture.key for picture in pictures)).digest()
        return pictures[0] if len(pictures) == 1 else cls(key, dict(joined(pictures)))

    def read(self, name: str, device: torch.device = CPU) -> torch.Tensor:
        """Return a tensor of the processor on a device, on which pixels are made of raw ones."""
        tensor = to_device(self.tensors[name], device)
        return tensor if self.table is None or not name.startswith(PIXELS) else self.table.pixels(tensor)

    @property
    def processed(self) -> Picture:
        """The same picture with the processor's pixels."""
        return self if self.table is None else Picture.of({name: self.read(name) for name in self.tensors})

    @property
    def values(self) -> int:
        """The number of its colour values, those of padding included."""
        frames = 1 if self.table is None else self.table.frames
        return frames * sum(value.numel() for name, value in self.tensors.items() if name.startswith(PIXELS))

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for pictures that can be encoded in one call: they differ only in their first dimension."""
        return tuple((name, value.dtype, *value.shape[1:]) for name, value in sorted(self.tensors.items()))


def joined(pictures: Sequence[Picture]) -> Inputs:
    """Return the processor's tensors of several pictures, the inverse of `divide`."""
    return Inputs({}, pictures)


def on_device(inputs: Mapping[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor:
    """Return a tensor of a processor on a device, where raw pixels become the processor's."""
    return inputs.on(name, device) if isinstance(inputs, Inputs) else to_device(inputs[name], device)


class Inputs(Mapping[str, torch.Tensor]):
    """A processor's tensors of a prompt.

    The pictures' tensors are joined only when one is read, because nobody does once a model's features of them are cached.
    """

    def __init__(self, text: Mapping[str, torch.Tensor], pictures: Sequence[Picture]):
        image_tensors = pictures[0].tensors if pictures else {}
        self._tensors = {name: tensor for name, tensor in text.items() if name not in image_tensors}
        self._pictures = pictures
        self._names = dict.fromkeys([*self._tensors, *image_tensors])

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors and name in self._names:
            self._tensors[name] = self.on(name, CPU)
        return self._tensors[name]

    def on(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a tensor on a device, on which pixels are made of raw ones."""
        if name in self._tensors:
            return to_device(self._tensors[name], device)
        parts = [picture.read(name, device) for picture in self._pictures]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_text_input(name: str) -> bool:
    """Return whether a processor's output has one value a token; everything else describes the images."""
    return name in ("input_ids", "attention_mask") or name.endswith("token_type_ids")


def divide(inputs: Mapping[str, torch.Tensor]) -> tuple[Picture, ...]:
    """Return the pictures in a processor's output, or a single one of all images where they cannot be separated.

    Without images there are none. The first dimension of every tensor counts images or tiles or, where the images have
    grids, patches.
    """
    tensors = {name: value for name, value in inputs.items() if not is_text_input(name)}
    if not tensors:
        return ()
    grids = tensors.get(GRID)
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
    """An LRU cache of image features by content, bounded in bytes."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[bytes, tuple[KeptFeatures, int]] = OrderedDict()
        self._blanks: OrderedDict[bytes, KeptFeatures] = OrderedDict()
        self._ahead: dict[bytes, KeptFeatures] = {}  # features of one prompt, encoded before it is embedded
        self._separable = True  # whether the model's features can be separated by picture
        self._stacked: bool | None = None  # whether the model takes several pictures' features as one tensor
        self._whole = True  # whether it takes those of DeepStack's layers as one tensor
        self._form = OneForm()

    def stats(self) -> dict[str, int]:
        """Return the counters, and the bytes in use."""
        counts = {"hits": self.hits, "misses": self.misses, "bytes": self.bytes}
        return {f"image_cache_{name}": count for name, count in counts.items()}

    def missing(self, pictures: Sequence[Picture]) -> list[Picture]:
        """Return a prompt's new pictures, each once, or one for all where they cannot be separated."""
        if not self._separable:
            pictures = (Picture.join(pictures),) if pictures else ()
        new = {
            picture.key: picture
            for picture in pictures
            if picture.key not in self._entries and picture.key not in self._ahead
        }
        return list(new.values())

    def encode_next(self, encode: Encode, pictures: Sequence[Picture], values: float = 0) -> int:
        """Encode the first new ones of a prompt's pictures in one call, for the `get` that follows.

        Encodes at least one, and as many of its shape as have together at most `values` values. Returns their number of
        values, 0 where there is no new one.
        """
        keys = {picture.key for picture in pictures}
        self._ahead = {key: features for key, features in self._ahead.items() if key in keys}
        missing = self.missing(pictures) if self._separable else []
        if not missing:
            return 0
        alike = [picture for picture in missing if picture.shape == missing[0].shape]
        sums = accumulate(picture.values for picture in alike)
        chosen = alike[: max(1, sum(total <= values for total in sums))]
        parts = self._parts(encode(joined(chosen)), len(chosen))
        if parts is None:
            return 0  # `get` then encodes them as one
        self.misses += len(chosen)
        for picture, part in zip(chosen, parts, strict=True):
            self._ahead[picture.key] = part
            self._keep(picture.key, part)
        return sum(picture.values for picture in chosen)

    def get(
        self, encode: Encode, prompts: Sequence[Sequence[Picture]], unseen: Collection[bytes] = frozenset()
    ) -> list[ModelOutput]:
        """Return the features of each prompt's pictures, encoding new ones, all of one shape in one call.

        Pictures whose keys are `unseen` may get zeros.
        """
        if not self._separable:
            unseen = {
                Picture.join(pictures).key for pictures in prompts if all(picture.key in unseen for picture in pictures)
            }
            prompts = [(Picture.join(pictures),) for pictures in prompts]
        features: dict[bytes, KeptFeatures] = {}
        missing: dict[tuple[object, ...], dict[bytes, Picture]] = {}
        for picture in (picture for pictures in prompts for picture in pictures):
            if picture.key in self._ahead:
                features[picture.key] = self._ahead[picture.key]
            elif picture.key in self._entries:
                self.hits += 1
                self._entries.move_to_end(picture.key)
                features[picture.key] = self._entries[picture.key][0]
            elif picture.key in unseen and picture.key in self._blanks:
                features[picture.key] = self._blanks[picture.key]
            else:
                shape = picture.shape if self._separable else (picture.key,)
                missing.setdefault(shape, {})[picture.key] = picture
        for pictures in missing.values():
            encoded = encode(joined(list(pictures.values())))
            whole_features: Sequence[KeptFeatures] = [Features.whole(encoded)]
            parts = self._parts(encoded, len(pictures)) if self._separable else whole_features
            if parts is None:  # known from the first image that a model encodes
                self._separable = False
                return self.get(encode, prompts, unseen)
            self.misses += len(pictures)
            for key, part in zip(pictures, parts, strict=True):
                features[key] = part
                self._keep(key, part)
        return [self._join([features[picture.key] for picture in pictures]) for pictures in prompts]

    def _parts(self, output: Any, count: int) -> Sequence[KeptFeatures] | None:
        """Split an output by its `count` pictures; None where it does not separate them. Raises MixedForms."""
        parts = PictureFeatures.separate(output, count)
        if parts is not None:
            stacked = isinstance(output.pooler_output, torch.Tensor)
            if self._stacked not in (None, stacked):
                raise MixedForms(
                    "The vision encoder returns image features now as a tensor and before as a sequence, or the reverse."
                )
            self._stacked = stacked
            self._whole = all(isinstance(layer, torch.Tensor) for layer in output.get("deepstack_features") or ())
        return parts

    def _join(self, parts: Sequence[KeptFeatures]) -> ModelOutput:
        """Join the cached features of a prompt's pictures as the model takes them."""
        separate = [part for part in parts if isinstance(part, PictureFeatures)]
        if len(separate) == len(parts):
            return PictureFeatures.join(separate, bool(self._stacked), self._whole)
        (features,) = parts
        assert isinstance(features, ModelOutput)
        return _changed(features, lambda name, value: value)

    def _keep(self, key: bytes, features: KeptFeatures) -> None:
        if isinstance(features, PictureFeatures):
            self._form.check("a picture's features", features.tensors)
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


def _changed(output: ModelOutput, change: Callable[[str, Any], Any]) -> ModelOutput:
    """Return an output of the same class with each of its fields changed."""
    return type(output)(**{field.name: change(field.name, output.get(field.name)) for field in fields(output)})


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in memory of its own."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _blank(value: Any) -> Any:
    """Return zeros in place of features, expanded so that they take no memory."""
    if isinstance(value, torch.Tensor):
        return value.new_zeros(()).expand(value.shape)
    if isinstance(value, PictureFeatures):
        return PictureFeatures(_blank(value.pooled), _blank(value.deep))
    if isinstance(value, ModelOutput):
        return _changed(value, lambda name, item: _blank(item))
    return type(value)(map(_blank, value)) if isinstance(value, (list, tuple)) else value


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, PictureFeatures):
        return _tensor_bytes(value.tensors)
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(item) for item in value)
    return 0
