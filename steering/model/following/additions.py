"""Traces one forward pass to find the modules whose outputs each decoder layer adds to the residual stream.

Every tensor of the pass is written, where possible, as a sum of module outputs with factors: the layer's input is a term of
its own, a module's output replaces the terms of its inputs, and additions and products with numbers carry the terms on. The
layer's output is then: its input, perhaps scaled, plus attention's outputs, plus the FFN's. The layer itself stands for its
input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from steering.decoder.updates import Terms

_aten: Any = torch.ops.aten
_SUMS = (_aten.add, _aten.add_)
_PRODUCTS = (_aten.mul, _aten.mul_)
_QUOTIENTS = (_aten.div, _aten.div_)
_COPIES = (_aten._to_copy, _aten.to, _aten.clone, _aten.contiguous)
Place = tuple[int, int]


class Additions(TorchDispatchMode):
    """Finds the terms of each layer's updates, attention's and the FFN's, in a pass of one token.

    They are in `found`, with the factor of the layer's input; without terms where its output is not that and two updates.
    """

    def __init__(self, layers: nn.ModuleList):
        super().__init__()
        self.found: list[tuple[Terms, Terms, float]] = [({}, {}, 1.0)] * len(layers)
        self._layers = layers
        self._layer: nn.Module | None = None
        self._values: dict[Place, tuple[Terms, torch.Tensor]] = {}  # tensors are held, or their memory would be reused
        self._attention: set[nn.Module] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._finish))
            for module in [inner for inner in layer.modules() if inner is not layer]:
                self._handles.append(module.register_forward_hook(self._note, with_kwargs=True))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._values.clear()
        super().__exit__(*error)

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._layer = layer
        self._attention.clear()
        self._set(args[0] if args else kwargs["hidden_states"], {layer: 1.0})

    def _finish(self, layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        terms = dict(self._terms(output))
        if factor_of_input := terms.pop(layer, 0.0):
            mha = {module: factor for module, factor in terms.items() if module in self._attention}
            ffn = {module: factor for module, factor in terms.items() if module not in self._attention}
            if mha and ffn:
                self.found[next(i for i, candidate in enumerate(self._layers) if candidate is layer)] = (
                    mha,
                    ffn,
                    factor_of_input,
                )
        self._layer = None
        self._values.clear()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note a module's output as a term, attention's if the module attends or its input is attention's output alone."""
        value = output[0] if isinstance(output, tuple) else output
        argument = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(value, torch.Tensor) or (
            isinstance(argument, torch.Tensor) and _place(argument) == _place(value)
        ):
            return
        source = self._terms(argument) if isinstance(argument, torch.Tensor) else {}
        if "step" in kwargs or (source and all(module in self._attention for module in source)):
            self._attention.add(module)
        self._set(value, {module: 1.0})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self._layer is not None and isinstance(output, torch.Tensor):
            if (terms := self._terms_of_result(func.overloadpacket, args, kwargs or {})) is not None:
                self._set(output, terms)
            elif func._schema.is_mutable:
                self._set(output, {})
        return output

    def _terms_of_result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Terms | None:
        """Return the terms of an operation's result; None where it is no such sum."""
        if func in _COPIES:
            return self._terms(args[0]) or None
        if func in _SUMS:
            first_tensor, right, factor = args[0], args[1], kwargs.get("alpha", 1)
            first, second = self._terms(first_tensor), self._terms(right)
            if not first or not second or first_tensor.shape != right.shape:
                return None
            return _combine(first, second, float(factor))
        if func in (*_PRODUCTS, *_QUOTIENTS):
            number = args[1]
            terms = self._terms(args[0])
            if isinstance(number, torch.Tensor) and number.numel() == 1 and number.shape != args[0].shape:
                number = number.item()  # a layer's own factor
            if not terms or not isinstance(number, int | float):
                return None
            scale: Callable[[float], float] = (lambda x: x * number) if func in _PRODUCTS else (lambda x: x / number)
            return {module: scale(factor) for module, factor in terms.items()}
        return None

    def _terms(self, tensor: Any) -> Terms:
        entry = self._values.get(_place(tensor)) if isinstance(tensor, torch.Tensor) else None
        return {} if entry is None else entry[0]

    def _set(self, tensor: torch.Tensor, terms: Terms) -> None:
        self._values[_place(tensor)] = terms, tensor


def _combine(first: Terms, second: Terms, factor: float) -> Terms:
    factors = {module: first.get(module, 0.0) + factor * second.get(module, 0.0) for module in (*first, *second)}
    return {module: value for module, value in factors.items() if value}


def _place(tensor: torch.Tensor) -> Place:
    """Return the location of a tensor in memory, the same for all views that have its elements."""
    return tensor.data_ptr(), tensor.numel()
