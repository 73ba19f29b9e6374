"""The places of pictures' features among a prompt's tokens, for which a GPU's host does not wait.

transformers counts them on the device to compare them with the features, so that the host waits twice for the whole vision
encoder before it may launch the first layer of the decoder. Where layers add further features (DeepStack), it waits in each.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def prepare(decoder: Any, device: torch.device) -> None:
    """Let a decoder on a GPU add features to its layers without asking for their places."""
    if device.type != "cpu" and hasattr(decoder, "_deepstack_process"):
        decoder._deepstack_process = added


def added(hidden_states: torch.Tensor, visual_pos_masks: torch.Tensor, visual_embeds: torch.Tensor) -> torch.Tensor:
    """Add features (k, d) to the k tokens of states (rows, n, d) that are True in a mask (rows, n)."""
    mask = visual_pos_masks.to(hidden_states.device)[..., None]
    features = visual_embeds.to(hidden_states)
    return torch.where(
        mask, hidden_states + torch.zeros_like(hidden_states).masked_scatter(mask, features), hidden_states
    )


@contextmanager
def counted(wrapper: Any, tokens: int, features: Any) -> Iterator[None]:
    """Keep a wrapper from counting places on the device within the block, if it can; raise ValueError for a wrong number.

    wrapper: the part of the model that takes pictures. tokens: the number of a prompt's image tokens. features: of all
    pictures, as `MLLM.image_features` returns them.
    """
    method = getattr(wrapper, "get_placeholder_mask", None)
    parameters = {} if method is None else inspect.signature(method).parameters
    optional = "image_features" in parameters and parameters["image_features"].default is None
    if method is None or not optional or "get_placeholder_mask" in vars(wrapper):
        yield
        return
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
