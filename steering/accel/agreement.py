"""The comparison of a pass in a new graph with the eager one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from steering.accel.backend import Ran
from steering.accel.traced import bound_of
from steering.devices import to_device
from steering.protocol.slots import PrefillChunk

WITHIN = 5e-2
"""Largest relative difference of all states together, from other kernels in half precision."""
OF_PART = 0.5
"""Largest relative difference of one token's state, and of what a hook measured.

It is above 1 if one is wrong. It is below where a token meets another expert, or a count has a threshold.
"""


def agree(
    ours: Ran,
    eager: Ran,
    chunk: PrefillChunk,
    changes: list[tuple[int, str, Any]],
    left: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> bool | None:
    """Return True where two passes of a chunk have the same results, None where the eager ones are not finite.

    changes: the attributes in which hooks measure, as `TreeSpec.changes`. Ours may be padded. left: what else both passes
    have left.
    """
    real = to_device(chunk.real > 0, eager.computed.hidden.device)
    states = [ran.computed.hidden[real].double() for ran in (ours, eager)]
    measured = [
        [*_measured(ran, changes), *(tensor.double() for tensor in own)]
        for ran, own in zip((ours, eager), left, strict=True)
    ]
    if not all(bool(tensor.isfinite().all()) for tensor in (states[1], *measured[1])):
        return None
    together, alone = _distance(states[0], states[1]), _distance(states[0], states[1], dim=-1)
    pairs = [_common(*pair) for pair in zip(*measured, strict=True)]
    close = [together <= WITHIN, (alone <= OF_PART).all(), *(_distance(*pair) <= OF_PART for pair in pairs)]
    return all(map(bool, close))


def _measured(ran: Ran, changes: list[tuple[int, str, Any]]) -> list[torch.Tensor]:
    """Return the tensors that a pass left in its hooks."""
    hooks = bound_of(ran.hooks).values
    left = tree_leaves([vars(hooks[number])[name] for number, name, _ in changes])
    return [leaf.double() for leaf in left if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _common(ours: torch.Tensor, eager: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parts that two measurements have in common, one of which is padded."""
    sizes = tuple(slice(min(pair)) for pair in zip(ours.shape, eager.shape, strict=True))
    return ours[sizes], eager[sizes]


def _distance(ours: torch.Tensor, eager: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the relative difference of two tensors."""
    return (ours - eager).norm(dim=dim) / eager.norm(dim=dim).clamp(min=1e-9)
