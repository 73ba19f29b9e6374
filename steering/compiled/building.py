"""Compiling a step for every number of rows, tokens and columns: what the child process does (`steering.compiled.child`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from torch.export import Dim
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_map

from steering.compiled.examples import EXAMPLES, example_step
from steering.compiled.step import StepSizes, Variant
from steering.compiled.tensors import as_json
from steering.model.mllm import MLLM


class Uncompilable(Exception):
    """A step is not one that can be compiled before it is used."""


def build(mllm: MLLM, variant: Variant, axes: int | None, threads: int, room: Path) -> tuple[Path, Any]:
    """Compile a step of this model; its library, a file in a folder, and what is to be noted of it.

    Raises Uncompilable, and whatever torch raises where it cannot trace or compile.
    """
    (step, given), (other, more) = (example_step(mllm, variant, axes, sizes) for sizes in EXAMPLES)
    if step.shape != other.shape:
        raise Uncompilable("its hooks depend on how many rows there are")
    first, second = step.arguments(EXAMPLES[0], given), step.arguments(EXAMPLES[1], more)
    with torch.no_grad():
        program = torch.export.export(step, first, dynamic_shapes=_dims(first, second), strict=False)
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
    return _library(Path(path), room), {"left": as_json(step.left), "shape": step.shape.text()}


def _library(archive: Path, room: Path) -> Path:
    """The shared library of a package, in a folder; raises Uncompilable where it needs more than itself."""
    with ZipFile(archive) as files:
        names = files.namelist()
        if any(name.endswith(".json") and not name.endswith("_metadata.json") for name in names):
            raise Uncompilable("it has operations that torch runs by its interpreter")
        (name,) = (name for name in names if name.endswith(".so"))
        place = room / "step.so"
        place.write_bytes(files.read(name))
    return place


def _dims(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Which sizes of arguments vary, by what they are in both examples; raises Uncompilable for one that varies with
    something else."""
    known = {pair: Dim(name) for name, pair in zip(StepSizes._fields, zip(*EXAMPLES, strict=True), strict=True)}

    def of(one: torch.Tensor, other: torch.Tensor) -> dict[int, Any]:
        pairs = list(zip(one.shape, other.shape, strict=True))
        if any(a != b and (a, b) not in known for a, b in pairs):
            raise Uncompilable(f"a hook holds a tensor whose size varies otherwise than rows and columns: {pairs}")
        return {axis: known[pair] for axis, pair in enumerate(pairs) if pair[0] != pair[1]}

    return tuple(tree_map(of, first, second))
