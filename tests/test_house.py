"""The order of the house: what may import what, and how large a room or a file may be."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("steering", "probes", "demo", "server")
BESIDE = ("tests", "benchmarks")
"""What may import whatever it likes, but is as small."""
FLOORS = (
    "loops",
    "decoder",
    "tower",
    "model",
    "prompt",
    "grammar",
    "tools",
    "protocol",
    "vectors",
    "recorders",
    "readouts",
    "interventions",
    "compiled",
    "runner",
    "relay",
    "engine",
    "auto",
    "bench",
)
"""The rooms of steering/, each of which imports only those before it; what stands in none is below all of them."""
MOST_LINES = 400
MOST_FILES = 12


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in files(*PACKAGES)}


def imported(path: Path) -> set[str]:
    """The project's modules that a file imports, wherever in it, those for types included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                whole if (whole := f"{node.module}.{alias.name}") in MODULES else node.module for alias in node.names
            }
    return found & MODULES.keys()


GRAPH = {name: imported(path) for name, path in MODULES.items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        trail.append(name)
        for other in sorted(GRAPH[name]):
            assert state.get(other) != 1, " -> ".join([*trail[trail.index(other) :], other])
            if other not in state:
                visit(other)
        trail.pop()
        state[name] = 2

    for name in sorted(GRAPH):
        if name not in state:
            visit(name)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_room_of_steering_imports_only_rooms_below_it(floor: str) -> None:
    allowed = {*FLOORS[: FLOORS.index(floor) + 1]}
    for name, others in GRAPH.items():
        if name.startswith(f"steering.{floor}."):
            for other in others:
                room = other.split(".")[1] if other.count(".") > 1 else None
                assert other != "steering", f"{name} imports the whole package"
                assert room is None or room in allowed, f"{name} imports {other}"


def test_the_engine_names_no_intervention_and_no_readout() -> None:
    known = {"steering.readouts.envelope", "steering.recorders.attention"}  # what all of them share
    for name, others in GRAPH.items():
        if name.startswith(("steering.engine.", "steering.runner.")):
            rooms = {
                other
                for other in others
                if other.startswith(("steering.interventions", "steering.readouts", "steering.recorders"))
            }
            assert rooms <= known, f"{name} imports {sorted(rooms - known)}"


def test_files_and_folders_are_small() -> None:
    folders: defaultdict[Path, int] = defaultdict(int)
    for path in files(*PACKAGES, *BESIDE):
        lines = len(path.read_text().splitlines())
        assert lines <= MOST_LINES, f"{path.relative_to(ROOT)} has {lines} lines"
        folders[path.parent] += path.name != "__init__.py"
    crowded = {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > MOST_FILES}
    assert not crowded


def test_no_two_public_classes_have_one_name() -> None:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
