"""The keys under which compiled steps are stored.

A package depends on what was traced: the graph, the sizes and strides in it, versions, the processor, and the C++ that is
linked. Tracing takes seconds, so a start first looks up another key, made of the code that a trace runs, without comments,
docstrings and layout. Where that code has changed, the compiling process traces the step, and finds the package of the same
graph again.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from steering.cpu.kernels.operators import SHIMS, sources

FORMAT = 6
CODE = (
    "accel",
    "cpu",
    "decoder",
    "interventions",
    "measures.py",
    "model",
    "recorders",
    "recurrent",
    "triton",
    "vision",
)
"""The parts of this package that a step's computations are written in."""
ROOT = Path(__file__).parents[1]


@functools.cache
def surroundings() -> dict[str, str]:
    """Return what compiled code depends on beside the model and the trace: versions, our own kernels, the processor."""
    kernels = hashlib.sha256()
    for path in sorted([*sources(), *sources()[0].parent.glob("*.h")]):
        kernels.update(f"{path.name}\0".encode() + path.read_bytes())
    for declarations in SHIMS.values():
        kernels.update("\n".join(declarations).encode())
    return {
        "format": str(FORMAT),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "python": sys.version,
        "kernels": kernels.hexdigest(),
        "processor": f"{platform.machine()} {_features()}",
    }


@functools.cache
def code_digest(root: Path = ROOT) -> str:
    """Return a digest of the code that a trace runs, without comments, docstrings and layout."""
    code = hashlib.sha256()
    for path in sorted(
        path for entry in CODE for path in (root / entry, *(root / entry).rglob("*")) if path.suffix == ".py"
    ):
        code.update(f"{path.relative_to(root)}\0{_bare(path.read_text())}".encode())
    return code.hexdigest()


def _bare(source: str) -> str:
    """Return a module's syntax tree as text, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def graph_key(program: ExportedProgram, about: dict[str, Any]) -> str:
    """Return the key of a traced program. about: the other things that its code depends on."""
    digest = hashlib.sha256("\n".join(_graph_lines(program)).encode()).hexdigest()
    return json.dumps({"graph": digest, **about, **surroundings()}, sort_keys=True)


def _graph_lines(program: ExportedProgram) -> Iterator[str]:
    """Yield every operation with its arguments and result, the inputs and outputs, and what may vary."""
    for node in program.graph.nodes:
        arguments = [repr(node.args), repr(node.kwargs)]
        yield f"{node.op} {node.name} {node.target} {' '.join(arguments)} -> {tree_map(_describe, node.meta.get('val'))}"
    yield str(program.graph_signature)
    yield repr(sorted((str(symbol), str(bounds)) for symbol, bounds in program.range_constraints.items()))
    for name, value in sorted(program.constants.items()):
        yield f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value}"


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {[*map(str, value.shape)]} {[*map(str, value.stride())]}"
    return str(value)


def _features() -> str:
    """Return the processor's features, for which code is compiled."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "vendor_id", "cpu family", "model", "stepping")
    lines_by_name = {
        line.split(":")[0].strip(): line for line in reversed(lines) if line.split(":")[0].strip() in names
    }
    return " ".join(lines_by_name[name] for name in sorted(lines_by_name))
