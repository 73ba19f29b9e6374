"""The layers of a decoder that have recurrent states in place of keys and values."""

from __future__ import annotations

from typing import Any

from torch import nn

from steering.errors import UnsupportedModel
from steering.recurrent import convolution, delta
from steering.recurrent.kernel import step_kernel
from steering.recurrent.slots import InSlots

KINDS = {"linear_attention": "linear_key_head_dim", "conv": "conv_L_cache"}
"""The types of such layers, and an entry that a config has if they are of a known form."""


def prepare(layers: nn.ModuleList, config: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Let linear attention and short convolutions keep their states in slots.

    Returns the numbers of the other layers, and of those that have one. A forward pass without a step is left as it is.
    Raises UnsupportedModel for one of another form; config: the text model's, which tells the types of layers.
    """
    found = []
    for index, layer in enumerate(layers):
        for module in layer.children():
            if (forward := _in_slots(module, index)) is not None:
                module.forward = forward
                found.append(index)
    kinds = getattr(config, "layer_types", None) or ()
    if unknown := {at for at, kind in enumerate(kinds[: len(layers)]) if kind in KINDS} - {*found}:
        raise UnsupportedModel(f"The linear attention or convolution of layers {sorted(unknown)} has an unknown form.")
    return tuple(at for at in range(len(layers)) if at not in found), tuple(found)


def _in_slots(module: Any, layer: int) -> InSlots | None:
    """Return the forward pass of a module with its states in slots, None for a module without such states."""
    if all(hasattr(module, part) for part in delta.PARTS):
        return delta.GatedDelta(module, layer, step_kernel(module))
    if all(hasattr(module, part) for part in convolution.PARTS):
        return convolution.ShortConvolution(module, layer)
    return None
