"""Modules of a decoder that run as fewer kernels.

These are projections of one input, gated FFNs, residual adds with the norm after them, and products with a single state.

Each replacement is compared with the module's own forward pass at load, on random states, and is used only where both agree;
a family that computes otherwise keeps its own modules. Within `own_forwards` all of them compute as the family does, for the
self-check's comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from steering.triton.products import ProductOps, Products
from steering.triton.replaced import Replaced, alike, drawn, is_linear

TRIALS = ((1, 1), (2, 3))
"""Rows and tokens of the states on which modules are compared."""
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""The layers of a gated FFN, by the names that families give them."""
TOGETHER = (
    ("q_proj", "k_proj", "v_proj"),
    *((gate, up) for gate, up, _ in GATED),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Layers of a module with the same input, in the order in which they are called."""
BLOCKS = (("input_layernorm", "post_attention_layernorm", "mlp"), ("operator_norm", "ffn_norm", "feed_forward"))
"""A decoder layer's norms and its FFN, by the names that families give them."""
ATTENTION = ("linear_attn", "conv", "self_attn")
"""A decoder layer's block before the FFN; the last returns its weights, too."""


class Ops(ProductOps, Protocol):
    """The interface of `steering.triton.triton_ops`."""

    def add_rms_norm(
        self, states: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float, shifted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def silu_product(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...


def fuse_modules(ops: Ops, decoder: nn.Module, output: nn.Module, norms: dict[nn.Module, tuple[float, bool]]) -> None:
    """Replace what can be replaced.

    norms: the RMS norms that `ops` computes equally, with their eps and True where their weight is shifted by 1.
    """
    products = Products(ops)
    for module in list(decoder.modules()):
        for names in TOGETHER:
            _fuse_projections(products, [getattr(module, name, None) for name in names])
    products.take((*decoder.modules(), output))  # layers that are not part of a larger product by now
    matches: dict[tuple[type, torch.dtype, str], bool] = {}
    for module in list(decoder.modules()):
        for replacement in (_gated, partial(_residual, norms=norms)):
            if (forward := replacement(ops, module)) is None:
                continue
            kind = type(module), next(module.parameters()).dtype, _attention_of(module)[0]
            if kind not in matches:
                matches[kind] = _same(module, forward, replacement is _gated)
            if matches[kind]:
                module.forward = Replaced(module, forward)


class _Projections:
    """Linear layers of the same input as one product: the first call computes it, and each layer takes its part.

    Their weights are views of one tensor.
    """

    def __init__(self, layers: list[Any], products: Products):
        weight = torch.cat([layer.weight for layer in layers])
        self._bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        self._weight, self._sizes = weight, [layer.out_features for layer in layers]
        self._product = products.of(weight, self._bias)
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


def _fuse_projections(products: Products, layers: list[Any]) -> None:
    if not all(is_linear(layer) for layer in layers):
        return
    weights = [layer.weight for layer in layers]
    alike_weights = len({(weight.shape[1], weight.dtype, weight.device) for weight in weights}) == 1
    if alike_weights and len({layer.bias is None for layer in layers}) == 1:
        _Projections(layers, products)


def _gated(ops: Ops, module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the forward pass of a gated FFN with SiLU, None for any other module."""
    if (layers := _ffn_of(module)) is None:
        return None
    gate, up, down = layers

    def forward(states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = down(ops.silu_product(gate(states), up(states)))
        return output

    return forward


def _ffn_of(module: Any) -> list[Any] | None:
    """Return the layers of a gated FFN, None for any other module."""
    by_names = ([getattr(module, name, None) for name in names] for names in GATED)
    return next((layers for layers in by_names if all(isinstance(layer, nn.Linear) for layer in layers)), None)


def _residual(ops: Ops, layer: Any, norms: dict[nn.Module, tuple[float, bool]]) -> Callable[..., torch.Tensor] | None:
    """Return the forward pass of a layer that adds its attention's update and normalises the sum, None for others."""
    (name, attention), children = _attention_of(layer), dict(layer.named_children())
    blocks = next(([children[block] for block in names] for names in BLOCKS if {*names, name} == children.keys()), None)
    if blocks is None or blocks[1] not in norms:
        return None
    first, norm, ffn = blocks
    eps, shifted = norms[norm]

    def forward(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        update = attention(hidden_states=first(hidden_states), **kwargs)
        update = update[0] if isinstance(update, tuple) else update
        total, normed = ops.add_rms_norm(hidden_states, update, norm.weight, eps, shifted)
        output: torch.Tensor = total + ffn(normed)
        return output

    return forward


def _attention_of(layer: Any) -> tuple[str, Any]:
    """Return the name of a decoder layer's attention, and the attention."""
    name = next((name for name in ATTENTION if hasattr(layer, name)), ATTENTION[-1])
    return name, getattr(layer, name, None)


def _same(module: Any, forward: Callable[..., torch.Tensor], is_mlp: bool) -> bool:
    """Return True where a replacement agrees with the module.

    Unless `is_mlp`, a stub stands in for attention, which would need a cache.
    """
    weight = next(module.parameters())
    if is_mlp:
        ffn = _ffn_of(module)
        assert ffn is not None
        return all(alike(forward(states), module(states)) for states in _trials(ffn[0].in_features, weight))
    name, attention = _attention_of(module)
    attributes = vars(attention)
    own_forward = attributes.get("forward")
    result = (lambda states: (states, None)) if name == ATTENTION[-1] else (lambda states: states)
    attributes["forward"] = lambda hidden_states, **_: result(hidden_states * 0.5 + 0.25)
    try:
        own = partial(module, position_embeddings=None)  # which some demand, for their attention alone
        width = next(len(child.weight) for child in module.children() if hasattr(child, "weight"))  # of a norm
        return all(alike(forward(states), own(states)) for states in _trials(width, weight))
    except Exception:  # another signature
        return False
    finally:
        del attributes["forward"]
        if own_forward is not None:
            attributes["forward"] = own_forward


def _trials(width: int, like: torch.Tensor) -> list[torch.Tensor]:
    return [drawn((*shape, width), like) for shape in TRIALS]
