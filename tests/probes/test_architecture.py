"""The rooms of probes import only rooms before them, also where an import is for types alone, and no files go in circles."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = tuple(file.parent.name for file in (ROOT / "probes").glob("*/command.py"))
ROOMS = (
    "answering",
    "reporting",
    "harness",
    "conflicts",
    "image_pairs",
    "vector",
    "pairs",
    "gate",
    "calibration",
    "image_qa",
    *BENCHMARKS,
    "prepare",
    "commands",
    "command",
)
FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / "probes").rglob("*.py")}


def imported(name: str) -> set[str]:
    """Return the files of probes that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for one in (f"{node.module}.{alias.name}" for alias in node.names):
                found |= {file for file in (one, node.module, f"{node.module}.__init__") if file in FILES}
    return found - {name}


def room(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"probes.__init__"}))
def test_a_room_imports_only_rooms_before_it_and_no_benchmark_another(name: str) -> None:
    for other in imported(name):
        if room(name) in BENCHMARKS and room(other) in BENCHMARKS:
            assert room(other) == room(name), f"{name} imports {other}"
        else:
            assert ROOMS.index(room(other)) <= ROOMS.index(room(name)), f"{name} imports {other}"


def test_no_files_import_each_other_in_circles() -> None:
    graph = {name: imported(name) for name in FILES}
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


def test_folders_and_files_stay_small() -> None:
    for folder in {path.parent for path in FILES.values()}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 12, folder
    for path in FILES.values():
        assert len(path.read_text().splitlines()) <= 400, path
