"""The part of a model that encodes pictures."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from steering.model.images import on_device
from steering.vision import sizes
from steering.vision.geometry import GRID, Geometry

SIZES = frozenset({GRID, "image_sizes", "batch_num_images"})
"""The processors' keys for sizes of pictures and their number, from which encoders read where features are split."""


class PictureEncoder:
    """Encodes pictures as a wrapper's `get_image_features` does.

    wrapper: the part of the model that takes pictures, on `device`. `splits_on_the_host` tells whether it takes grids and
    sizes on the CPU, so that it does not wait for the device to split features; None until it is known.
    """

    def __init__(self, wrapper: Any, geometry: Geometry, device: torch.device):
        self._wrapper, self._geometry, self._device = wrapper, geometry, device
        self._names = frozenset(inspect.signature(wrapper.get_image_features).parameters)
        self.splits_on_the_host: bool | None = None

    def __call__(self, pictures: Mapping[str, torch.Tensor]) -> Any:
        """Encode pictures, given as the processor's tensors, and return the result of the wrapper's `get_image_features`."""
        with self._geometry.on_the_host(pictures, self._device) as inputs:
            known = {name for name in pictures if name in SIZES & self._names}
            if not inputs:  # an encoder that computes its own reads grids on the device
                known.discard(GRID)
            if not known or self.splits_on_the_host is False:
                return self._encode(pictures, inputs)
            try:
                with sizes.on_the_host(self._device) if known - {GRID} else nullcontext():
                    features = self._encode(pictures, inputs, known)
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except RuntimeError:
                if self.splits_on_the_host:
                    raise
                features = self._encode(pictures, inputs)
                self.splits_on_the_host = False  # some encoders compute with them on the device, too
                return features
            self.splits_on_the_host = True
            return features

    def _encode(
        self, pictures: Mapping[str, torch.Tensor], inputs: Mapping[str, Any], on_the_host: Collection[str] = ()
    ) -> Any:
        arguments: dict[str, Any] = {
            name: pictures[name] if name in on_the_host else on_device(pictures, name, self._device)
            for name in pictures
            if name in self._names
        }
        return self._wrapper.get_image_features(**arguments, **inputs, return_dict=True)
