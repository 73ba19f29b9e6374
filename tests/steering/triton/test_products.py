"""The choice of a product with a single state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from steering.triton import products
from steering.triton.products import Products
from tests.steering.triton.reference import Ops


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "COLD", 1000)


class Kernels(Ops):
    """Products that take these seconds, torch's first, and count which were taken."""

    def __init__(self, *seconds: float):
        super().__init__()
        self.taken = [0] * (len(seconds) - 1)
        self.weights: set[int] = set()
        self.matvecs = tuple(self._numbered(number) for number in range(len(self.taken)))
        self._seconds = seconds

    def _numbered(self, number: int) -> products.Product:
        def product(state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.taken[number] += 1
            self.weights.add(weight.data_ptr())
            return linear(state, weight, bias) + (number == 0)  # the first one is wrong

        return product

    def seconds(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> float:
        before = list(self.taken)
        run()
        changed = [number for number, count in enumerate(self.taken) if count > before[number]]
        return self._seconds[1 + changed[0] if changed else 0]


def drawn(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 1, 6).to(dtype), torch.randn(9, 6).to(dtype), torch.randn(9).to(dtype)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ((5.0, 0.1, 4.0, 3.0), 2),
        ((5.0, 0.1, 3.0, 2.95), 1),  # the difference is within what times of the same product differ by
        ((5.0, 0.1, 4.9, 5.0), None),
        ((1.0, 0.1, 2.0, 3.0), None),
    ],
)
def test_the_fastest_right_kernel_is_taken_where_it_is_faster_than_torch(
    seconds: tuple[float, ...], chosen: int | None
) -> None:
    ops = Kernels(*seconds)
    state, weight, bias = drawn()
    product = Products(ops).of(weight, bias)
    ops.taken = [0] * 3
    assert torch.equal(product(state, weight, bias), linear(state, weight, bias))
    assert ops.taken == [int(number == chosen) for number in range(3)]
    assert (product is linear) == (chosen is None)
    several = torch.randn(2, 3, 6, dtype=torch.bfloat16)
    assert torch.equal(product(several, weight, bias), linear(several, weight, bias))
    assert sum(ops.taken) == int(chosen is not None), "a kernel takes a single state"


def test_timed_products_read_more_weights_than_a_cache_holds() -> None:
    ops = Kernels(2.0, 1.0, 1.0)
    _, weight, bias = drawn()
    Products(ops).of(weight, bias)
    assert len(ops.weights) == 1 + 1000 // (9 * 6 * 2)


def test_without_times_the_first_right_kernel_is_taken() -> None:
    class Untimed(Kernels):
        def seconds(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> float:
            raise RuntimeError("operation not permitted when stream is capturing")

    ops = Untimed(1.0, 1.0, 1.0, 1.0)
    state, weight, bias = drawn()
    product = Products(ops).of(weight, bias)
    ops.taken = [0] * 3
    product(state, weight, bias)
    assert ops.taken == [0, 1, 0]


def test_a_kernel_that_fails_is_not_taken() -> None:
    ops = Kernels(3.0, 1.0, 2.0)

    def failing(*given: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    ops.matvecs = (failing, *ops.matvecs)
    state, weight, bias = drawn()
    product = Products(ops).of(weight, bias)
    ops.taken = [0] * 2
    product(state, weight, bias)
    assert ops.taken == [0, 1]


def test_each_shape_is_timed_once_and_float32_never() -> None:
    ops = Kernels(2.0, 1.0, 1.0)
    chosen = Products(ops)
    layers = [nn.Linear(6, 9, dtype=dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float32)]
    with torch.inference_mode():
        chosen.take(layers)
        timed = sum(ops.taken)
        chosen.take([nn.Linear(6, 9, dtype=torch.bfloat16)])
    assert sum(ops.taken) == timed
    assert ["forward" in vars(layer) for layer in layers] == [True, True, False]
