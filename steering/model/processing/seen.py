"""A cache of processed pictures, because a chat sends its own again with each question."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from PIL import Image
from transformers import BatchFeature

from steering.lru import ByteBoundedLRU
from steering.model.images import PIXELS, Picture
from steering.model.processing.raw_pixels import RawPixels
from steering.vision.geometry import GRID

CAPACITY = 256 * 2**20
"""The default capacity in bytes."""

Processed = TypeVar("Processed", Picture, dict[str, Any])


class SeenPictures(ByteBoundedLRU[Any]):
    """An LRU cache of a model's processed pictures, by their pixels and the processor's arguments, bounded in bytes.

    Within `noting` it is asked before the processor is. It is thread-safe.

    Where pictures have grids (`image_grid_thw`) they are processed one by one and kept apart; others are kept together as
    one call's, because how one is cut may depend on its neighbours.
    """

    def __init__(self, processor: Any, capacity: int = CAPACITY):
        super().__init__(capacity, _bytes)
        self.hits = self.misses = 0
        self._noted = threading.local()
        images = getattr(processor, "image_processor", None)
        if images is not None:
            self._apart = GRID in getattr(images, "model_input_names", ())
            self._ask_first(processor)

    def stats(self) -> dict[str, int]:
        """Return the counters, and the bytes in use."""
        return {f"processed_images_{name}": getattr(self, name) for name in ("hits", "misses", "bytes")}

    @contextmanager
    def noting(self) -> Iterator[list[Picture]]:
        """Answer this thread's calls of the processor from the cache within the block.

        The list holds the pictures of such a call afterwards, if they are kept apart.
        """
        self._noted.pictures = pictures = list[Picture]()
        try:
            yield pictures
        finally:
            del self._noted.pictures

    def _ask_first(self, processor: Any) -> None:
        images = processor.image_processor
        plain = type(images)
        raw = RawPixels(processor, plain.__call__)

        def called(own: Any, images_given: Any, *args: Any, **kwargs: Any) -> BatchFeature:
            noted, flat = getattr(self._noted, "pictures", None), _flat(images_given)
            # In other modes, such as palettes, pixels alone do not determine the colours.
            readable = all(isinstance(image, Image.Image) and image.mode == "RGB" for image in flat)
            if noted is None or args or not readable:
                return plain.__call__(own, images_given, *args, **kwargs)
            settings = repr(sorted(kwargs.items()))

            def processed(images: Any) -> dict[str, Any]:
                return dict(plain.__call__(own, images, **kwargs))

            if not self._apart:
                return BatchFeature(self._process_once(settings, flat, lambda _: processed(images_given)))

            def alone(images: list[Image.Image]) -> Picture:
                return raw.picture(images[0], kwargs) or Picture.of(processed(images))

            pictures = [self._process_once(settings, [image], alone) for image in flat]
            noted += pictures
            return BatchFeature(
                {name: _together(name, [picture.tensors[name] for picture in pictures]) for name in pictures[0].tensors}
            )

        # A subclass, because processors save whatever attributes they hold.
        images.__class__ = type(plain.__name__, (plain,), {"__call__": called, "__module__": plain.__module__})

    def _process_once(
        self, settings: str, images: list[Image.Image], make: Callable[[list[Image.Image]], Processed]
    ) -> Processed:
        """Return the processed pictures for such a call, from the cache or by `make`."""
        hasher = hashlib.sha256(settings.encode())
        for image in images:
            hasher.update(f"{image.size}".encode() + image.tobytes())
        key = hasher.digest()
        cached: Processed | None = self.get(key)
        with self._lock:
            self.hits += len(images) if cached is not None else 0
            self.misses += len(images) if cached is None else 0
        if cached is not None:
            return cached
        result = make(images)
        self.keep(key, result)
        return result


def _together(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the tensors of several pictures.

    Tensors that a prompt's construction does not read take no memory here: `Inputs` has them.
    """
    if name.startswith(PIXELS):
        return parts[0].new_zeros(()).expand(sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts)


def _bytes(result: Picture | dict[str, Any]) -> int:
    tensors = result.tensors if isinstance(result, Picture) else result
    return sum(value.nbytes for value in tensors.values() if isinstance(value, torch.Tensor))


def _flat(images: Any) -> list[Any]:
    """Return the pictures in nested lists as one list."""
    return [image for part in images for image in _flat(part)] if isinstance(images, list | tuple) else [images]
