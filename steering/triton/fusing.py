"""Norms, rotary embeddings and a decoder's modules on a GPU, by Triton kernels.

transformers' norms are seven kernels each, and a layer's rotary embedding ten, on which decode steps, with few rows each,
spend a quarter of their time. Each replacement is compared with the model's own first, and used only where both agree.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from steering.forwards import runs_own
from steering.triton import modules
from steering.triton.replaced import Replaced, alike, drawn

log = logging.getLogger(__name__)

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class ModelOps(modules.Ops, Protocol):
    """The interface of `steering.triton.triton_ops`."""

    def rms_norm(self, states: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool) -> torch.Tensor: ...
    def rotated(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def fuse(model: nn.Module, decoder: nn.Module, device: torch.device) -> None:
    """Replace modules of a model and its decoder by kernels, where the model is on a single GPU."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    from steering.triton import triton_ops  # noqa: PLC0415 -- only torch's builds for GPUs can import it

    try:
        fuse_by(triton_ops, model, decoder)
    except Exception as error:  # triton also needs a C compiler
        log.warning("some modules keep transformers' own code: %s: %s", type(error).__name__, error)


@torch.inference_mode()
def fuse_by(ops: ModelOps, model: nn.Module, decoder: nn.Module | None = None) -> None:
    """Replace the modules by these operations, on any device."""
    kinds: dict[tuple[type, torch.dtype], bool | None] = {}
    places: dict[str, tuple[torch.device, torch.dtype]] = {}
    norms: dict[nn.Module, tuple[float, bool]] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor):
            places.setdefault(type(module).__module__, (weight.device, weight.dtype))
        if not _is_rms_norm(module):
            continue
        kind = type(module), weight.dtype
        if kind not in kinds:
            kinds[kind] = _adds_one(ops, module)
        if (shifted := kinds[kind]) is not None:
            norms[module] = _eps(module), shifted
            ours = functools.partial(ops.rms_norm, weight=weight, eps=_eps(module), shifted=shifted)
            module.forward = Replaced(module, ours)
    for name, place in places.items():
        _fuse_rotary(ops, name, *place)
    if decoder is not None:
        modules.fuse_modules(ops, decoder, model.get_output_embeddings(), norms)  # type: ignore[operator]


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    is_plain_weight = isinstance(weight, torch.Tensor) and weight.ndim == 1 and not isinstance(weight, DTensor)
    return (
        is_plain_weight
        and type(module).__name__.endswith("RMSNorm")
        and "forward" not in vars(module)
        and _eps(module) > 0
    )


def _eps(module: nn.Module) -> float:
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    return eps if isinstance(eps, float) else 0.0


def _adds_one(ops: ModelOps, norm: Any) -> bool | None:
    """Return True where a norm adds 1 to its weight, False where it does not; None where ours agrees in neither way."""
    tried = [drawn((*shape, norm.weight.shape[0]), norm.weight) for shape in ((1, 1), (2, 3), (129,))]
    try:
        expected = [norm(states) for states in tried]
    except TypeError:  # it takes more arguments
        return None
    for shifted in (False, True):
        ours = (ops.rms_norm(states, norm.weight, _eps(norm), shifted) for states in tried)
        if all(map(alike, ours, expected)):
            return shifted
    return None


def _fuse_rotary(ops: ModelOps, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the rotary embeddings of a transformers module by ours, on a GPU, where both agree."""
    like = torch.empty(0, device=device, dtype=dtype)
    module = sys.modules.get(name)
    for attribute, make, trials in (
        (
            "apply_rotary_pos_emb",
            _rotate_text,
            [_texts(like, *size) for size in ((2, 5, 3, 1, 16), (1, 1, 28, 4, 128))],
        ),
        (
            "apply_rotary_pos_emb_vision",
            _rotate_vision,
            [_vision_trial(like, *size) for size in ((5, 3, 12), (129, 16, 80))],
        ),
    ):
        original: Rotary | None = getattr(module, attribute, None)
        if original is None or hasattr(original, "ours"):
            continue
        try:
            same = all(all(map(alike, make(ops, *arguments), original(*arguments))) for arguments in trials)
        except Exception:  # another signature
            continue
        if same:
            setattr(module, attribute, _dispatch(original, functools.partial(make, ops)))


def _texts(like: torch.Tensor, rows: int, tokens: int, heads: int, kv_heads: int, width: int) -> list[torch.Tensor]:
    """Return queries, keys and angles of text, laid out in memory token by token."""
    query, key = (drawn((rows, tokens, count, width), like).transpose(1, 2) for count in (heads, kv_heads))
    angle = drawn((1, tokens, width), like)
    return [query, key, angle, 1 - angle]


def _vision_trial(like: torch.Tensor, tokens: int, heads: int, width: int) -> list[torch.Tensor]:
    """Return queries, keys and angles of pictures; the angles are float32."""
    query, key, _ = drawn((tokens, 3, heads, width), like).unbind(1)
    angle = drawn((tokens, width), like).float()
    return [query, key, angle, 1 - angle]


def _dispatch(original: Rotary, ours: Rotary) -> Rotary:
    """Return a function that calls ours for supported arguments on a GPU, otherwise the model's own.

    The check is at each call, because a process may have models on both kinds of devices.
    """

    @functools.wraps(original)
    def rotary(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ours_can = not kwargs and args[0].is_cuda and _is_supported(*args) and not runs_own()
        return ours(*args) if ours_can else original(*args, **kwargs)

    rotary.ours = ours  # type: ignore[attr-defined]
    return rotary


def _is_supported(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: object) -> bool:
    """Return True where these are queries, keys and angles that ours supports."""
    halves = query.shape[-1] == cos.shape[-1] and cos.ndim == query.ndim - 1
    dense = query.stride(-1) == key.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1
    dtypes = cos.dtype == sin.dtype and (query.ndim == 3 or cos.dtype == query.dtype == key.dtype)
    return not more and halves and dense and dtypes


def _rotate_text(
    ops: ModelOps, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys (rows, heads, n, d) by angles (1 or rows, n, d), in their dtype."""
    return ops.rotated(query, key, cos, sin, True)


def _rotate_vision(
    ops: ModelOps, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys (n, heads, d) by angles (n, d), in float32."""
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    query, key = ops.rotated(query, key, cos.float()[None], sin.float()[None], False)
    return query[0].transpose(0, 1), key[0].transpose(0, 1)
