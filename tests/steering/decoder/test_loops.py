"""Our own loops, as a compiler makes them, against products in double precision."""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import library_paths

from steering.compiled.building import LOOPS, build_loops
from steering.compiled.library import _address, _capsule, _handles
from steering.decoder import loops

COMPILER = shlex.split(os.environ.get("CXX", "g++"))
pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="there is no compiler")
TOLERANCE = 2e-6
"""By a sum of one number; whatever the dtype, what is read is exact and sums are float32."""


class Compiled:
    """The library's functions, called as a compiled step calls them."""

    def __init__(self, folder: Path, threads: int):
        build_loops(threads, folder)
        path, linked = folder / "loops.so", [f"-L{one}" for one in library_paths()]
        whole = ["-Wl,--whole-archive", str(folder / f"lib{LOOPS}.a"), "-Wl,--no-whole-archive"]
        openmp = [] if threads == 1 else ["-fopenmp"]
        subprocess.run(
            [*COMPILER, "-shared", "-o", str(path), *whole, *linked, "-ltorch_cpu", "-lc10", *openmp], check=True
        )
        self._library = ctypes.CDLL(str(path))

    def __call__(
        self, name: str, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor | None
    ) -> torch.Tensor:
        given = [one for one in (first, second, third) if one is not None]
        held = _handles.unsafe_alloc_void_ptrs_from_tensors(given)
        pointers: list[Any] = [ctypes.c_void_p(_address(one, None)) for one in held]
        made = ctypes.c_void_p()
        if name == "few_linear":  # its third may be none
            pointers[2:] = [None if third is None else ctypes.byref(pointers[2])]
        if self._library[f"aoti_torch_cpu_{name}"](*pointers, ctypes.byref(made)):
            raise RuntimeError("it refused")
        (out,) = _handles.alloc_tensors_by_stealing_from_void_ptrs([_capsule(made, None, None)])
        return out  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=[1, 2], ids=["one thread", "two threads"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return Compiled(tmp_path_factory.mktemp("loops"), request.param)


def pooled(rows: int, heads: int, columns: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """(rows, heads, columns, width): the first rows and columns of more of both."""
    pool = torch.randn(rows + 2, heads, columns + 9, width, generator=torch.Generator().manual_seed(rows))
    pool[:, :, columns:] = torch.nan  # whoever looks there sees it
    return pool.to(dtype)[:rows, :, :columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "group", "columns", "width"),
    [(1, 1, 1, 1, 16), (3, 2, 3, 37, 32), (2, 4, 7, 64, 80), (5, 1, 9, 50, 20), (2, 2, 16, 33, 256), (1, 3, 2, 5, 7)],
)
def test_attention_of_one_query_a_row(
    compiled: Compiled, dtype: torch.dtype, rows: int, heads: int, group: int, columns: int, width: int
) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads, group, width, generator=random)
    pool = pooled(rows, heads, columns, width, dtype)
    positions = torch.randint(0, columns, (rows,), generator=random)
    behind = torch.arange(columns)[None, None, None] > positions[:, None, None, None]
    exact = query.double() @ pool.double().transpose(-1, -2)
    expected = exact.masked_fill(behind, 0)
    told = compiled("decode_scores", query, pool, positions)
    assert told.dtype == torch.float32
    torch.testing.assert_close(told.double(), expected, rtol=0, atol=TOLERANCE * width)
    torch.testing.assert_close(loops.decode_scores(query, pool, positions), told, rtol=0, atol=TOLERANCE * width)

    weights = exact.masked_fill(behind, -torch.inf).softmax(-1).float()
    summed = weights.double() @ pool.double()
    told = compiled("decode_sums", weights, pool, positions)
    torch.testing.assert_close(told.double(), summed, rtol=0, atol=TOLERANCE * 10)
    torch.testing.assert_close(loops.decode_sums(weights, pool, positions), told, rtol=0, atol=TOLERANCE * 10)


def test_what_a_row_does_not_see_is_not_read(compiled: Compiled) -> None:
    pool = pooled(2, 2, 20, 32, torch.float32)
    pool[0, :, 5:], pool[1, :, 12:] = torch.nan, torch.inf
    positions, query = torch.tensor([4, 11]), torch.ones(2, 2, 3, 32)
    assert compiled("decode_scores", query, pool, positions).isfinite().all()
    assert compiled("decode_sums", torch.ones(2, 2, 3, 20), pool, positions).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_half_precision_are_read_exactly(compiled: Compiled, dtype: torch.dtype) -> None:
    """All of them that are: subnormal, infinite, not a number."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    pool = numbers.view(1, 1, 1, -1)
    told = compiled("decode_sums", torch.ones(1, 1, 1, 1), pool, torch.zeros(1, dtype=torch.int64)).flatten()
    torch.testing.assert_close(told, numbers.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
@pytest.mark.parametrize(
    ("rows", "width", "outputs"), [(1, 192, 512), (2, 20, 16), (3, 512, 1040), (16, 7, 192), (37, 64, 48)]
)
def test_a_layer_of_a_few_rows(
    compiled: Compiled, by_column: bool, bias: bool, rows: int, width: int, outputs: int
) -> None:
    random = torch.Generator().manual_seed(0)
    states, weight = torch.randn(rows, width, generator=random), torch.randn(width, outputs, generator=random).t()
    if not by_column:
        weight = weight.contiguous()
    added = torch.randn(outputs, generator=random) if bias else None
    assert loops.suits(weight)
    expected = torch.nn.functional.linear(states.double(), weight.double(), None if added is None else added.double())
    told = compiled("few_linear", states, weight, added)
    torch.testing.assert_close(told.double(), expected, rtol=0, atol=TOLERANCE * width)
    torch.testing.assert_close(loops.few_linear(states, weight, added), told, rtol=0, atol=TOLERANCE * width)


def test_what_it_is_not_for_is_refused(compiled: Compiled) -> None:
    states = torch.randn(2, 32)
    for weight in (torch.randn(48, 64)[:, :32], torch.randn(32, 40).t(), torch.randn(32, 48, dtype=torch.float64).t()):
        assert not loops.suits(weight)
        with pytest.raises(RuntimeError, match="refused"):
            compiled("few_linear", states, weight, None)
    pool, at = pooled(2, 2, 20, 32, torch.float64), torch.zeros(2, dtype=torch.int64)
    for query, keys in ((torch.ones(2, 2, 3, 32), pool), (torch.ones(2, 2, 32, 3).mT, pool.float())):
        with pytest.raises(RuntimeError, match="refused"):
            compiled("decode_scores", query, keys, at)
