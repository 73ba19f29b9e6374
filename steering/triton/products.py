"""Products of large weights with a single state, by whichever of torch's product and some kernels is fastest here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear

from steering.triton.replaced import Replaced, alike, drawn, is_linear

LARGE = 2**22
"""Weights of a layer above which its product with a single state is bound by reading them."""
COLD = 2**28
"""Bytes of weights that a timed run reads, more than any GPU's cache holds."""
GAIN = 0.97
"""The time of a product that replaces another one, relative to that one's: times of the same product differ by less."""

Product = Callable[..., torch.Tensor]
"""A function of states (..., inputs), weight (outputs, inputs) and bias (outputs,) or None."""

log = logging.getLogger(__name__)


class ProductOps(Protocol):
    """The products of `steering.triton.triton_ops`."""

    @property
    def matvecs(self) -> Sequence[Product]:
        """Kernels that take a single state."""

    def seconds(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> float: ...


class Products:
    """The product of each shape of weights."""

    def __init__(self, ops: ProductOps):
        self._ops = ops
        self._chosen: dict[tuple[torch.Size, torch.dtype], Product] = {}

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Replace the products of linear layers among these that have their own, where a kernel is faster."""
        for module in modules:
            if not is_linear(module) or "forward" in vars(module):
                continue
            layer: Any = module
            if (product := self.of(layer.weight, layer.bias)) is not linear:
                layer.forward = Replaced(layer, partial(product, weight=layer.weight, bias=layer.bias))

    def of(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Return the product for a weight: torch's, or one that takes a kernel for a single state."""
        if weight.numel() < LARGE or weight.dtype == torch.float32 or not weight.is_contiguous():
            return linear
        key = weight.shape, weight.dtype
        if key not in self._chosen:
            kernel = self._fastest(weight, bias)
            self._chosen[key] = linear if kernel is linear else partial(_product, kernel)
        return self._chosen[key]

    def _fastest(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        """Return the fastest product of this weight with a single state; the first kernel where they cannot be timed."""
        state = drawn((1, 1, weight.shape[1]), weight)
        right = [linear, *self._right(state, weight, bias)]
        try:
            weights = [weight, *(weight.clone() for _ in range(COLD // weight.nbytes))]
            runs = [partial(_each, product, state, weights, bias) for product in right]
            times = [self._ops.seconds(run, weight.device) for run in runs]
        except Exception as error:
            log.warning("products with a single state cannot be timed: %s: %s", type(error).__name__, error)
            return right[min(1, len(right) - 1)]
        best = 0
        for number, time in enumerate(times):
            if time < GAIN * times[best]:
                best = number
        microseconds = ", ".join(f"{1e6 * time / len(weights):.1f}" for time in times)
        log.info(
            "%d x %d times a single state: number %d of %s us, of which 0 is torch's", *weight.shape, best, microseconds
        )
        return right[best]

    def _right(self, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Iterator[Product]:
        """Yield the kernels that agree with torch's product."""
        expected = linear(state, weight, bias)
        for kernel in self._ops.matvecs:
            try:
                agrees = alike(kernel(state, weight, bias), expected)
            except Exception as error:  # such as too little shared memory
                log.warning("a product with a single state fails: %s: %s", type(error).__name__, error)
                continue
            if agrees:
                yield kernel


def _each(
    product: Product, state: torch.Tensor, weights: list[torch.Tensor], bias: torch.Tensor | None
) -> list[torch.Tensor]:
    return [product(state, weight, bias) for weight in weights]


def _product(kernel: Product, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply a single state by a kernel, several by torch's product."""
    if states.numel() == weight.shape[1]:
        return kernel(states.contiguous(), weight, bias)
    return linear(states, weight, bias)
