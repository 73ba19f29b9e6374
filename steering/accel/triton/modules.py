"""Modules of a decoder that run as fewer kernels.

These are projections of one input, gated FFNs, residual adds with the norm after them, and products with a single state.

Each replacement is compared with the module's own forward pass at load, on random states, and is used only where both agree;
a family that computes otherwise keeps its own modules. Within `own_forwards` all of them compute as the family does, for the
self-check's comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from steering.forwards import runs_own

WITHIN = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Largest difference of two results relative to the largest of them: the last bits of the dtype."""
TRIALS = ((1, 1), (2, 3))
"""Rows and tokens of the states on which modules are compared."""
LARGE = 2**22
"""Weights of a layer above which its product with a single state is bound by reading them."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of a module with the same input, in the order in which they are called."""


class Replaced:
    """A module's forward pass, and its replacement."""

    def __init__(self, module: nn.Module, replacement: Callable[..., Any]):
        self._module, self._replacement = module, replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if runs_own():
            return type(self._module).forward(self._module, *args, **kwargs)
        return self._replacement(*args, **kwargs)


class Ops(Protocol):
    """The interface of `steering.accel.triton.triton_ops`."""

    def add_rms_norm(
        self, states: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...
    def matvec(self, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor: ...


def fuse_modules(ops: Ops, decoder: nn.Module, output: nn.Module, norms: dict[nn.Module, tuple[float, bool]]) -> None:
    """Replace what can be replaced.

    norms: the RMS norms that `ops` computes equally, with their eps and True where their weight is shifted by 1.
    """
    product = _Product(ops)
    for module in list(decoder.modules()):
        for names in TOGETHER:
            _fuse_projections(product, [getattr(module, name, None) for name in names])
    product.take((*decoder.modules(), output))  # layers that are not part of a larger product by now
    matches: dict[tuple[type, torch.dtype], bool] = {}
    for module in list(decoder.modules()):
        for replacement in (_gated, partial(_residual, norms=norms)):
            if (forward := replacement(ops, module)) is None:
                continue
            kind = type(module), next(module.parameters()).dtype
            if kind not in matches:
                matches[kind] = _same(module, forward, replacement is _gated)
            if matches[kind]:
                module.forward = Replaced(module, forward)  # type: ignore[method-assign]


class _Product:
    """Linear layers, each with the kernel for a single state where that agrees."""

    def __init__(self, ops: Ops):
        self._ops = ops
        self._tried: dict[tuple[torch.Size, torch.dtype], bool] = {}

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Replace the products of plain linear layers among these by the kernel, where it may be used."""
        for module in modules:
            if type(module) is nn.Linear and _is_plain(module) and self.knows(module.weight, module.bias):
                ours = partial(self, weight=module.weight, bias=module.bias)
                module.forward = Replaced(module, ours)  # type: ignore[method-assign]

    def knows(self, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Return True where the kernel may multiply by this weight."""
        if weight.numel() < LARGE or weight.dtype == torch.float32 or not weight.is_contiguous():
            return False
        key = weight.shape, weight.dtype
        if key not in self._tried:
            state = drawn((1, 1, weight.shape[1]), weight)
            expected = nn.functional.linear(state, weight, bias)
            self._tried[key] = alike(self._ops.matvec(state, weight, bias), expected)
        return self._tried[key]

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if states.numel() == weight.shape[1]:
            return self._ops.matvec(states.contiguous(), weight, bias)
        return nn.functional.linear(states, weight, bias)


class _Projections:
    """Linear layers of the same input as one product: the first call computes it, and each layer takes its part.

    Their weights are views of one tensor.
    """

    def __init__(self, layers: list[Any], product: _Product):
        weight = torch.cat([layer.weight for layer in layers])
        self._bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self._weight, self._sizes = weight, [layer.out_features for layer in layers]
        self._product: Callable[..., torch.Tensor] = (
            product if product.knows(weight, self._bias) else nn.functional.linear
        )
        self._layers = layers
        self._states: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        for index, (layer, part) in enumerate(zip(layers, weight.split(self._sizes), strict=True)):
            layer.weight = nn.Parameter(part, requires_grad=False)
            layer.forward = Replaced(layer, partial(self.part, index))

    def part(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """Return the output of layer `index` for states (..., inputs)."""
        if index == 0:
            self._states = states
            self._parts = self._product(states, self._weight, self._bias).split(self._sizes, -1)
        elif states is not self._states:
            return nn.functional.linear(states, self._layers[index].weight, self._layers[index].bias)
        part = self._parts[index]
        if index == len(self._sizes) - 1:
            self._states, self._parts = None, ()
        return part


def _fuse_projections(product: _Product, layers: list[Any]) -> None:
    if not all(_is_linear(layer) for layer in layers):
        return
    weights = [layer.weight for layer in layers]
    alike_weights = len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) == 1
    if alike_weights and len({layer.bias is None for layer in layers}) == 1:
        _Projections(layers, product)


def _gated(ops: Ops, module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the forward pass of a gated FFN with SiLU, None for any other module."""
    if not all(isinstance(getattr(module, name, None), nn.Linear) for name in ("gate_proj", "up_proj", "down_proj")):
        return None

    def forward(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = module.down_proj(ops.silu_product(module.gate_proj(states), module.up_proj(states)))
        return output

    return forward


def _residual(ops: Ops, layer: Any, norms: dict[nn.Module, tuple[float, bool]]) -> Callable[..., torch.Tensor] | None:
    """Return the forward pass of a layer that adds its attention's update and normalises the sum, None for others."""
    names = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
    norm = getattr(layer, "post_attention_layernorm", None)
    if {name for name, _ in layer.named_children()} != names or norm not in norms:
        return None
    eps, shifted = norms[norm]

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update, *_ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
        total, normed = ops.add_rms_norm(hidden_states, update, norm.weight, eps, shifted)
        output: torch.Tensor = total + layer.mlp(normed)
        return output

    return forward


def _same(module: Any, forward: Callable[..., torch.Tensor], is_mlp: bool) -> bool:
    """Return True where a replacement agrees with the module.

    Unless `is_mlp`, a stub stands in for attention, which would need a cache.
    """
    weight = next(module.parameters())
    width = module.gate_proj.in_features if is_mlp else module.input_layernorm.weight.shape[0]
    if is_mlp:
        return all(alike(forward(states), module(states)) for states in _trials(width, weight))
    attention = vars(module.self_attn)
    own_forward = attention.get("forward")
    attention["forward"] = lambda hidden_states, **_: (hidden_states * 0.5 + 0.25, None)
    try:
        return all(alike(forward(states), module(states)) for states in _trials(width, weight))
    except Exception:  # another signature
        return False
    finally:
        del attention["forward"]
        if own_forward is not None:
            attention["forward"] = own_forward


def _trials(width: int, like: torch.Tensor) -> list[torch.Tensor]:
    return [drawn((*shape, width), like) for shape in TRIALS]


def _is_linear(layer: Any) -> bool:
    return type(layer) is nn.Linear and not isinstance(layer.weight, DTensor)


def _is_plain(layer: Any) -> bool:
    return _is_linear(layer) and "forward" not in vars(layer)


def drawn(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return random numbers, the same each time, with the dtype and device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like)


def alike(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return True where two tensors agree up to the last bits of their dtype, relative to the largest number."""
    if ours.shape != expected.shape or ours.dtype != expected.dtype or expected.dtype not in WITHIN:
        return False
    ours, most = ours.float(), expected.float().abs().max()
    return bool((ours - expected.float()).abs().max() <= WITHIN[expected.dtype] * most)
