"""The places of pictures' features among a prompt's tokens, counted on the host.

transformers counts them on the device to compare them with the features, so that the host waits twice for the whole vision
encoder before it may launch the first layer of the decoder.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counted(wrapper: Any, inputs: Mapping[str, torch.Tensor], features: Any) -> Iterator[None]:
    """Keep a wrapper from counting places on the device within the block, if it can; raise ValueError for a wrong number.

    wrapper: the part of the model that takes pictures. inputs: the processor's tensors, on the CPU. features: of all
    pictures, as `MLLM.image_features` returns them.
    """
    method = getattr(wrapper, "get_placeholder_mask", None)
    parameters = {} if method is None else inspect.signature(method).parameters
    optional = "image_features" in parameters and parameters["image_features"].default is None
    if method is None or not optional or "get_placeholder_mask" in vars(wrapper):
        yield
        return
    tokens = int((inputs["input_ids"] == wrapper.config.image_token_id).sum())
    rows = sum(part.shape[:-1].numel() for part in features.pooler_output)
    if tokens != rows:
        raise ValueError(f"Image features and image tokens do not match, tokens: {tokens}, features: {rows}")
    wrapper.get_placeholder_mask = functools.partial(_without_features, method)
    try:
        yield
    finally:
        del wrapper.get_placeholder_mask


def _without_features(method: Callable[..., Any], *args: Any, image_features: Any = None, **kwargs: Any) -> Any:
    """Return the places as `method` does, which compares them with no features."""
    return method(*args, **kwargs)
