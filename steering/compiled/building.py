"""Compiling a step for every number of rows and columns: what the child process does (`steering.compiled.child`)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim
from torch.export.graph_signature import OutputKind

from steering.compiled.examples import EXAMPLES, ExampleSizes, example_hooks
from steering.compiled.step import Step
from steering.compiled.tensors import as_json, taken_apart
from steering.model.mllm import MLLM
from steering.protocol.signals import Signal


class Uncompilable(Exception):
    """A step is not one that can be compiled before it is used."""


def build(mllm: MLLM, signals: frozenset[Signal], axes: int | None, threads: int, room: Path) -> tuple[Path, Any]:
    """Compile a step of this model; the package's file in a folder, and what is to be noted of it.

    Raises Uncompilable, and whatever torch raises where it cannot trace or compile.
    """
    first, second = (taken_apart(example_hooks(mllm, signals, sizes)) for sizes in EXAMPLES)
    if first[0] != second[0]:
        raise Uncompilable("its hooks depend on how many rows there are")
    shape = first[0]
    step = Step(mllm, shape, axes)
    column = list(mllm.column().tensors)
    pools = [[_pooled(one, sizes) for one in column] for sizes in EXAMPLES]
    dims = _Dims()
    given, pooled = ([dims.of(*pair) for pair in zip(*two, strict=True)] for two in ((first[1], second[1]), pools))
    row = {0: dims.rows}
    with torch.no_grad():
        program = torch.export.export(
            step,
            _arguments(first[1], pools[0], EXAMPLES[0]),
            dynamic_shapes=(row, row, row, {0: dims.columns}, given, pooled),
            strict=False,
        )
    changed = [
        spec.target for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION
    ]
    if any(not str(name).startswith("pooled") for name in changed):
        raise Uncompilable(f"{', '.join(map(str, changed))}: a hook writes into what it was given")
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(room / "built.pt2"),
        inductor_configs={
            "aot_inductor.package_constants_in_so": False,  # the weights stay where they are
            "cpp.threads": threads,
        },
    )
    package = room / "step.pt2"
    shutil.move(str(path), package)
    return package, {"left": as_json(step.left), "shape": shape.text()}


def _arguments(given: list[torch.Tensor], pooled: list[torch.Tensor], sizes: ExampleSizes) -> tuple[Any, ...]:
    rows = [torch.zeros(sizes.rows, dtype=torch.int64, device=pooled[0].device) for _ in range(3)]
    contiguous = [one.contiguous() for one in given]
    return (*rows, torch.zeros(sizes.columns, device=pooled[0].device), contiguous, pooled)


def _pooled(column: torch.Tensor, sizes: ExampleSizes) -> torch.Tensor:
    """A tensor of a pool of these sizes, shaped after that of a single column."""
    return torch.zeros(sizes.slots, column.shape[1], sizes.length, column.shape[3], dtype=column.dtype)


class _Dims:
    """Which sizes vary, by what they are in both examples."""

    def __init__(self) -> None:
        names = ExampleSizes._fields
        self._known = {pair: Dim(name) for name, pair in zip(names, zip(*EXAMPLES, strict=True), strict=True)}
        self.rows, self.columns = (self._known[pair] for pair in list(self._known)[:2])

    def of(self, one: torch.Tensor, other: torch.Tensor) -> dict[int, Any]:
        """The sizes of a tensor that vary; raises Uncompilable for one that varies with something else."""
        pairs = list(zip(one.shape, other.shape, strict=True))
        if any(a != b and (a, b) not in self._known for a, b in pairs):
            raise Uncompilable(f"a hook holds a tensor whose size varies otherwise than rows and columns: {pairs}")
        return {axis: self._known[pair] for axis, pair in enumerate(pairs) if pair[0] != pair[1]}
