"""The masks that wrappers build for their decoders, where they say no more than the engine's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from steering.decoder.kernels import visible

SLIDING = "sliding_attention"
"""The key of the mask of layers with a window, where there is one for each type of layer."""


class WrapperMasks:
    """Recognises masks by which each token attends to all before it, in layers with a window to those within it.

    A prompt with such masks may be cut into chunks. Wrappers of the Gemma family build them for every prompt, and others
    where the tokens of an image attend to each other. window: of the decoder's layers, None where they have none.
    """

    def __init__(self, window: int | None):
        self._window = window
        self._of_images = True  # False once a prompt with images had others

    def read(self, mask: Any, length: int, images: bool) -> Any:
        """Return None for a mask that is causal, or that only marks padding, of which there is none; else the mask.

        images: the prompt has images.
        """
        if mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2):
            return None
        if images and not self._of_images:  # on a GPU, a comparison would wait for the images' features
            return mask
        if self._is_causal(mask if isinstance(mask, Mapping) else {"": mask}, length):
            return None
        self._of_images &= not images
        return mask

    def _is_causal(self, masks: Mapping[str, Any], length: int) -> bool:
        given = {kind: mask for kind, mask in masks.items() if mask is not None}
        if any(not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool for mask in given.values()):
            return False
        if any(mask.shape != (1, 1, length, length) for mask in given.values()):
            return False
        rows = {mask.device: torch.arange(length, device=mask.device) for mask in given.values()}
        windows = {kind: self._window if kind == SLIDING else None for kind in given}
        return all(
            bool((mask[0, 0] == visible(rows[mask.device], length, windows[kind])).all())
            for kind, mask in given.items()
        )
