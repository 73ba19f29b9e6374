"""Compile every kernel for GPUs that are not there, and report what each needs of one.

Triton's interpreter finds no error that only its compiler raises, and no kernel that needs more shared memory than a GPU
has, which raises at its first launch. Run as a script with compute capabilities, as in `compiled_for 86 90`; prints a line
for each kernel (capability, registers of a thread, bytes of its stack, bytes of shared memory, what for), and ends with
"compiled".
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from steering.recurrent import triton_delta
from steering.recurrent.kernel import is_right, stepped
from steering.runner.sampler import SamplerRows
from steering.triton import triton_attention, triton_ops, triton_truncation, truncation
from tests.steering.recurrent.modules import a_module

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, table 30)."""
MEASURED = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SPILLED = 64
"""Most bytes of a thread's stack in half precision: a kernel that spills more has the wrong sizes."""
HALF = (torch.bfloat16, torch.float16)


class Absent:
    """Triton's driver of a GPU that is not there."""

    def __init__(self, capability: int):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia import driver as nvidia

        written: str = nvidia.ty_to_cpp(kind)
        return written


@contextmanager
def compiling(capability: int, compiled: Callable[[str, Any], None]) -> Iterator[None]:
    """Compile the kernels that are launched, and launch none; `compiled` takes each one's name and what was made of it."""

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *given, **options: compiled(kernel.fn.__name__, kernel.warmup(*given, grid=grid, **options))

    driver.set_active(Absent(capability))
    with (
        mock.patch.object(JITFunction, "__getitem__", launcher),
        mock.patch.object(torch.cuda, "device_of", return_value=nullcontext()),
        mock.patch.object(triton_attention, "_processors", return_value=132),
    ):
        yield


def needs(binary: bytes) -> tuple[int, int]:
    """Return the registers of a thread and the bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        told = subprocess.run(
            [MEASURED, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told.stdout)[0]
    return int(registers), int(stack)


def launch_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int, hooked: bool, see: bool) -> None:
    """Launch decode attention of three rows, with everything that a hook may ask for, or nothing."""
    rows, length, columns = 3, 1200, 900

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    new, cache = zeros(rows, kv_heads, 1, width), zeros(rows, kv_heads, length, width)
    settings = (torch.zeros(rows, length, 2), torch.zeros(rows, 3, 4), torch.zeros(rows, dtype=torch.uint8))
    bias = torch.zeros(rows, 3, heads)[:, 1], torch.zeros(rows, length)
    changes = (40, 5.0, bias, torch.zeros(rows, columns)) if hooked else (None, None, None, None)
    triton_attention.decode_attention(
        zeros(rows, heads, 1, width), new, new, cache, cache, torch.tensor([70, 3, length - 1]), 0.1, columns, 1,
        *changes, settings if see else None, looks=hooked, sinks=zeros(heads) if hooked else None,
    )  # fmt: skip


def launch_ops(dtype: torch.dtype) -> None:
    """Launch the other kernels, with the sizes of models of 3 to 70 billion parameters."""
    for width, shifted in itertools.product((1280, 3584, 8192), (False, True)):
        states, weight = torch.zeros(3, 1, width, dtype=dtype), torch.zeros(width, dtype=dtype)
        triton_ops.rms_norm(states, weight, 1e-6, shifted)
        triton_ops.add_rms_norm(states, states, weight, 1e-6, shifted)
    for width in (64, 80, 128, 256):
        query, key = (torch.zeros(3, 5, heads, width, dtype=dtype).transpose(1, 2) for heads in (28, 4))
        angles = torch.zeros(1, 5, width, dtype=dtype)
        triton_ops.rotated(query, key, angles, angles, True)
        triton_ops.rotated(query, key, angles.float(), angles.float(), False)
    triton_ops.silu_product(*torch.zeros(3, 37888, dtype=dtype).split(18944, -1))
    if dtype in HALF:
        state, weight = torch.zeros(1, 1, 3584, dtype=dtype), torch.zeros(4608, 3584, dtype=dtype)
        for product, bias in itertools.product(triton_ops.matvecs, (None, state)):
            product(state, weight, bias)


def launch_delta(dtype: torch.dtype) -> None:
    """Launch linear attention of single tokens, with the sizes of Qwen3.5-9B and 27B, kept and not."""
    for shape in ((16, 32, 128, 128, 4), (16, 48, 128, 128, 4)):
        module = a_module(shape, dtype)
        with suppress(RuntimeError):  # it launches nothing, so its results are not right
            is_right(functools.partial(stepped, triton_delta.delta_step), module)


def launch_truncation() -> None:
    """Launch the kernel as its check does, and as a sampler does for some rows, of which settings are views."""
    with suppress(RuntimeError):  # it launches nothing, so its results are not right
        truncation.is_right(triton_truncation.thresholds, torch.device("cpu"))
    settings = SamplerRows(4, 152_064, [0], torch.device("cpu"))
    for rows in (slice(0, 1), slice(0, 4), slice(1, 2), slice(3, 4), torch.tensor([0]), torch.tensor([1, 3])):
        limits = settings.limits(rows)
        triton_truncation.thresholds(torch.zeros(len(limits.top_k), 152_064), *limits)


def main() -> None:
    torch.manual_seed(0)
    for capability in map(int, sys.argv[1:]):
        told: set[str] = set()
        label = ""

        def note(name: str, compiled: Any, capability: int = capability, told: set[str] = told) -> None:
            if compiled.hash in told:
                return
            told.add(compiled.hash)
            (registers, stack), shared = needs(compiled.asm["cubin"]), compiled.metadata.shared
            print(capability, registers, stack, shared, name, label, sep="\t", flush=True)  # noqa: B023
            assert shared <= SHARED[capability] * 1024, "more shared memory than there is"
            assert stack <= SPILLED or dtype not in HALF, "registers spill"  # noqa: B023

        with compiling(capability, note):
            label, dtype = "truncation", torch.float32
            launch_truncation()
            assert len(told) == 1, "the kernel that is checked at construction is not the one that serves"
            for dtype in (torch.bfloat16, torch.float32):
                label = str(dtype)
                launch_ops(dtype)
                launch_delta(dtype)
                shapes = ((28, 4, 128), (16, 1, 256), (32, 8, 64), (4, 4, 80))
                for shape, hooked, see in itertools.product(shapes, (False, True), (False, True)):
                    label = f"{dtype} {shape} hooked {hooked} see {see}"
                    launch_attention(dtype, *shape, hooked, see)
        assert len(told) > 50
    print("compiled")


if __name__ == "__main__":
    main()
