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
from torch.utils._pytree import tree_map_only

from steering.devices import to_device


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
def counted(wrapper: Any, ids: torch.Tensor, sent: torch.Tensor) -> Iterator[None]:
    """Let a wrapper find and count the places of features on the CPU within the block.

    It raises ValueError for a wrong number, as it does by itself. wrapper: the part of the model that takes pictures. ids: a
    prompt's tokens (1, n) on the CPU. sent: the same on the device, the tensor that the wrapper is given.
    """
    found = {name: getattr(wrapper, name, None) for name in _REPLACED if name not in vars(wrapper)}
    replaced = {name: method for name, method in found.items() if method is not None}
    for name, method in replaced.items():
        setattr(wrapper, name, functools.partial(_REPLACED[name], method, ids, sent))
    try:
        yield
    finally:
        for name in replaced:
            delattr(wrapper, name)


def _places(method: Callable[..., Any], ids: torch.Tensor, sent: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the places as `method` does, which reads the tokens and, of embeddings and features, only the sizes."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    embeds = bound.arguments.get("inputs_embeds")
    if bound.arguments.get("input_ids") is not sent or embeds is None:
        return method(*args, **kwargs)
    bound.arguments |= {"input_ids": ids, "inputs_embeds": torch.empty(()).expand(embeds.shape)}
    masks = method(*bound.args, **bound.kwargs)
    return tree_map_only(torch.Tensor, lambda mask: to_device(mask, embeds.device), masks)


def _merged(
    method: Callable[..., torch.Tensor],
    ids: torch.Tensor,
    sent: torch.Tensor,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor,
    image_hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Put features into embeddings as `method`, a wrapper's `inputs_merger`, does."""
    if input_ids is not sent:
        return method(input_ids, inputs_embeds, image_hidden_states)
    mask = (ids == method.__self__.config.image_token_id)[..., None]  # type: ignore[attr-defined]
    tokens, features = int(mask.sum()), image_hidden_states.to(inputs_embeds)
    if tokens * inputs_embeds.shape[-1] != features.numel():
        raise ValueError(
            f"Image features and image tokens do not match, tokens: {tokens}, features: {features.shape[0]}"
        )
    return inputs_embeds.masked_scatter(to_device(mask, inputs_embeds.device), features)


_REPLACED: dict[str, Callable[..., Any]] = {"get_placeholder_mask": _places, "inputs_merger": _merged}
"""The methods with which transformers' wrappers find the places of features, and what runs instead."""
