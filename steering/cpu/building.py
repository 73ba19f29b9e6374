"""Trace and compile a step for every number of rows, tokens and columns, in a child process (`steering.cpu.child`)."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch
from torch._inductor.cpp_builder import BuildOptionsBase
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils._pytree import tree_map
from torch.utils.cpp_extension import include_paths

from steering.accel.tensors import as_json
from steering.cpu.examples import EXAMPLES, example_step, manifest
from steering.cpu.kernels.operators import SHIMS, sources
from steering.cpu.keys import graph_key
from steering.cpu.packing import PackedWeights
from steering.cpu.step import StepSizes, Variant
from steering.model.mllm import MLLM

LOOPS = "helmsight_loops"
"""The name of the archive of the compiled C++ in `steering/cpu/kernels`."""


class Uncompilable(Exception):
    """A step cannot be compiled ahead of time."""


class TracedStep(NamedTuple):
    """A traced step. about: the metadata stored with its library. key: everything that the library depends on."""

    program: ExportedProgram
    about: dict[str, Any]
    key: str


def trace(mllm: MLLM, variant: Variant, axes: int | None, weights: PackedWeights, threads: int) -> TracedStep:
    """Trace a step of this model; raise Uncompilable, or torch's own error, where it cannot be traced."""
    (step, tensors), (other_step, more) = (example_step(mllm, variant, axes, weights, sizes) for sizes in EXAMPLES)
    if step.shape != other_step.shape:
        raise Uncompilable("its hooks depend on the number of rows")
    first, second = step.arguments(EXAMPLES[0], tensors), step.arguments(EXAMPLES[1], more)
    with torch.no_grad():
        program = torch.export.export(step, first, dynamic_shapes=_dims(first, second), strict=False)
    changed = [
        spec.target for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION
    ]
    if any(not str(name).startswith("pooled") for name in changed):
        raise Uncompilable(f"{', '.join(map(str, changed))}: a hook writes into its input")
    about = {"left": as_json(step.left), "shape": step.shape.text(), "rows": _rows(program)}
    depends = {"manifest": manifest(step), "settings": SETTINGS, "threads": threads}
    return TracedStep(program, about, graph_key(program, depends))


SETTINGS = {
    "aot_inductor.package_constants_in_so": False,  # the weights stay in the process's memory
    "aot_inductor.custom_op_libs": [LOOPS],
}
"""Settings of compilation."""


def build(traced: TracedStep, threads: int, room: Path) -> Path:
    """Compile a traced step; return its library, a file in `room`. `build_loops` must run first.

    Raises Uncompilable, or torch's own error, where it cannot be compiled.
    """
    path = torch._inductor.aoti_compile_and_package(
        traced.program,
        package_path=str(room / "built.pt2"),
        inductor_configs={**SETTINGS, "aot_inductor.custom_ops_to_c_shims": SHIMS, "cpp.threads": threads},
    )
    return _library(Path(path), room)


def quote_library_folders() -> None:
    """Let torch's linker commands name folders whose paths have spaces, of which older torch quotes includes alone."""
    if torch.__version__ >= "2.14":
        return
    library_folders = BuildOptionsBase.get_libraries_dirs

    def quoted(options: BuildOptionsBase) -> list[str]:
        return [shlex.quote(folder) for folder in library_folders(options)]

    BuildOptionsBase.get_libraries_dirs = quoted  # type: ignore[assignment]


def build_loops(threads: int, room: Path) -> None:
    """Compile our own loops into an archive in `room`, unless it is there.

    The archive becomes a part of each library that this process builds.
    """
    os.environ["LIBRARY_PATH"] = os.pathsep.join([str(room), *filter(None, [os.environ.get("LIBRARY_PATH")])])
    if (room / f"lib{LOOPS}.a").exists():
        return
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = ["-std=c++20", "-O3", "-march=native", "-fPIC", f"-DTHREADS={threads}"]
    flags += [] if threads == 1 else ["-fopenmp"]
    folders = [f"-I{folder}" for folder in include_paths()]
    source, object_file = room / f"{LOOPS}.cpp", str(room / f"{LOOPS}.o")
    source.write_text("".join(f'#include "{path}"\n' for path in sources()))  # one by one takes twice as long
    _run([*compiler, *flags, *folders, "-c", str(source), "-o", object_file])
    _run(["ar", "rcs", str(room / f"lib{LOOPS}.a"), object_file])


def _rows(program: ExportedProgram) -> dict[str, list[int | None]]:
    """Return the row axis of each of a step's inputs and outputs; None where it has none."""
    signature, nodes = program.graph_signature, {node.name: node for node in program.graph.nodes}
    rows = nodes[signature.user_inputs[0]].meta["val"].shape[0]

    def axis(name: Any) -> int | None:
        sizes = enumerate(nodes[name].meta["val"].shape)
        return next(
            (at for at, size in sizes if isinstance(size, torch.SymInt) and size.node.expr == rows.node.expr), None
        )

    return {"inputs": [*map(axis, signature.user_inputs)], "outputs": [*map(axis, signature.user_outputs)]}


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["it says nothing"]
        raise Uncompilable(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1])[:400]}")


def _library(archive: Path, room: Path) -> Path:
    """Return the shared library of a package, extracted into `room`; raise Uncompilable where it needs other files."""
    with ZipFile(archive) as files:
        names = files.namelist()
        if any(name.endswith(".json") and not name.endswith("_metadata.json") for name in names):
            raise Uncompilable("it has operations that torch does not compile")
        (name,) = (name for name in names if name.endswith(".so"))
        place = room / "step.so"
        place.write_bytes(files.read(name))
    return place


def _dims(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the dynamic sizes of arguments, from what they are in both examples.

    Raises Uncompilable for a size that varies with something else.
    """
    dims = {pair: Dim(name) for name, pair in zip(StepSizes._fields, zip(*EXAMPLES, strict=True), strict=True)}

    def of(left: torch.Tensor, right: torch.Tensor) -> dict[int, Any]:
        pairs = list(zip(left.shape, right.shape, strict=True))
        if any(a != b and (a, b) not in dims for a, b in pairs):
            raise Uncompilable(f"a hook holds a tensor whose size depends on more than rows and columns: {pairs}")
        return {axis: dims[pair] for axis, pair in enumerate(pairs) if pair[0] != pair[1]}

    return tuple(tree_map(of, first, second))
