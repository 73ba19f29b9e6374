"""The order of the house: what may import what, and how large a room or a file may be."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("steering", "probes", "demo", "server")
BESIDE = ("tests", "benchmarks")
"""Packages that may import whatever they like, but have the same limits of size."""
FLOORS = {
    "steering": (
        "triton", "recurrent", "decoder", "vision", "model", "prompt", "grammar", "tools", "protocol", "vectors",
        "recorders", "readouts", "interventions", "accel", "runner", "cpu", "messages", "core", "front", "auto", "notebook",
        "child", "vllm", "bench",
    ),
    "server": (
        "startup", "images", "wire", "engine", "engine_process", "vectors", "requests", "dialects", "journal", "telemetry",
        "http", "access", "context", "openapi", "process", "api", "web", "app", "serving", "wsgi", "replicas", "batches",
        "observe", "commands", "cli",
    ),
    "probes": (
        "answering", "reporting", "harness", "conflicts", "image_pairs", "image_qa", "calibration", "vector", "pairs",
        "gate", "mc2", "sage", "spd", "stme", "mmsap", "pope", "mme", "chair", "phd", "vsr", "tallyqa", "ambigcaps", "alarm",
        "faithfulness", "readings", "reproduce", "prepare", "commands", "command",
    ),
    "demo": ("world", "draws", "model", "evaluation", "training", "organisms", "smol", "command"),
}  # fmt: skip
"""The rooms of each package, and files beside them, each of which imports only those before it.

A file that is in none is below all of them. A room inside a room may be on a floor of its own.
"""
MOST_LINES = 400
MOST_FILES = 12


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for path in files(*PACKAGES, "benchmarks")}


class Parsed(NamedTuple):
    """The parts of a file that the rules are about."""

    imports: tuple[tuple[str, tuple[str, ...]], ...]
    """Modules, and the names that are imported from each, wherever in the file, those for types included."""
    attributes: tuple[tuple[str, str, int], ...]
    """The variable of which it is one ("" of anything else), its name, and its line."""
    classes: tuple[str, ...]


@functools.cache
def parsed(path: Path) -> Parsed:
    """Parse a file, once a process."""
    tree = ast.parse(path.read_text(), str(path))
    imports: list[tuple[str, tuple[str, ...]]] = []
    attributes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.append((node.value.id if isinstance(node.value, ast.Name) else "", node.attr, node.lineno))
        elif isinstance(node, ast.Import):
            imports += [(alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports.append(("." * node.level + (node.module or ""), tuple(alias.name for alias in node.names)))
    classes = tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    return Parsed(tuple(imports), tuple(attributes), classes)


def imported(path: Path) -> set[str]:
    """Return the project's modules that a file imports."""
    found: set[str] = set()
    for module, names in parsed(path).imports:
        wholes = [f"{module}.{name}" for name in names]
        found |= {whole if whole in MODULES else module for whole in wholes} or {module}
    return found & MODULES.keys()


@functools.cache
def graph() -> dict[str, set[str]]:
    """Return the modules that each module imports.

    Computed at the first call, as every process of the suite collects this file.
    """
    return {name: imported(path) for name, path in MODULES.items()}


def test_no_file_imports_itself_by_way_of_others() -> None:
    state: dict[str, int] = {}
    trail: list[str] = []

    def visit(name: str) -> None:
        state[name] = 1
        trail.append(name)
        for other in sorted(graph()[name]):
            assert state.get(other) != 1, " -> ".join([*trail[trail.index(other) :], other])
            if other not in state:
                visit(other)
        trail.pop()
        state[name] = 2

    for name in sorted(graph()):
        if name not in state:
            visit(name)


def floor_of(module: str) -> str | None:
    """Return the floor that a module is on, the innermost one; None where it is on none."""
    package, _, rest = module.partition(".")
    rooms = [floor for floor in FLOORS.get(package, ()) if f"{rest}.".startswith(f"{floor}.")]
    return max(rooms, key=len, default=None)


@pytest.mark.parametrize("floor", [f"{package}.{floor}" for package, floors in FLOORS.items() for floor in floors])
def test_a_room_imports_only_rooms_below_it(floor: str) -> None:
    package, _, room = floor.partition(".")
    below = {*FLOORS[package][: FLOORS[package].index(room) + 1], None}
    members = [name for name in graph() if name.startswith(f"{package}.") and floor_of(name) == room]
    assert members, f"there is no {floor}"
    for name in members:
        for other in graph()[name]:
            assert other != package or not graph()[package], f"{name} imports the whole package"
            assert not other.startswith(f"{package}.") or floor_of(other) in below, f"{name} imports {other}"


def test_no_benchmark_imports_another() -> None:
    benchmarks = {f"probes.{path.parent.name}" for path in (ROOT / "probes").glob("*/command.py")}
    for name, others in graph().items():
        room, *rooms = (".".join(module.split(".")[:2]) for module in (name, *others))
        assert room not in benchmarks or not benchmarks & {*rooms} - {room}, f"{name} imports another benchmark"


@pytest.mark.parametrize("package", FLOORS)
def test_what_lies_below_all_rooms_imports_none(package: str) -> None:
    for name, others in graph().items():
        if name.startswith(f"{package}.") and floor_of(name) is None:
            assert name.count(".") == 1, f"{name} is in a room that has no floor"
            rooms = {other for other in others if other.startswith(f"{package}.") and floor_of(other) is not None}
            assert not rooms, f"{name} imports {sorted(rooms)}"


def test_the_engine_names_no_intervention_and_no_readout() -> None:
    known = {"steering.readouts.envelope", "steering.recorders.attention", "steering.recorders.spans"}  # shared by all
    known.add("steering.recorders.additions")  # which the self-check alone has
    for name, others in graph().items():
        if name.startswith(("steering.core.", "steering.front.", "steering.runner.")):
            rooms = {
                other
                for other in others
                if other.startswith(("steering.interventions", "steering.readouts", "steering.recorders"))
            }
            assert rooms <= known, f"{name} imports {sorted(rooms - known)}"


def words_of(path: Path) -> set[str]:
    """Return the names in a file and the words of its docstrings, without error messages and module names."""
    words: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.keyword):
            words.add(next(getattr(node, name) for name in ("id", "attr", "arg") if hasattr(node, name)) or "")
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words |= {node.name, *re.findall(r"\w+", ast.get_docstring(node) or "")}
        elif isinstance(node, ast.Module):
            words |= {*re.findall(r"\w+", ast.get_docstring(node) or "")}
    return words


@pytest.mark.parametrize("floor", ["decoder", "protocol", "runner", "messages", "core", "front"])
def test_the_trunk_has_no_word_of_compiling_and_names_no_method(floor: str) -> None:
    """Code that makes passes faster belongs to accel, methods of papers to interventions.

    The core has its compilation, and the engine in front the option `compiled`.
    """
    forbidden = {
        "Scope",
        "scope",
        "of_scope",
        "compiled_of",
        "counts_within",
        "uniform",
        "gains",
        "shifted",
        "enhanced",
    }
    forbidden |= {"looped", "Pai", "PAI", "SAGE", "SeeRows", "ThinkRows", "amplify", "damping"}
    if floor not in ("core", "front"):
        forbidden |= {"compiled", "Compiled", "CompiledSteps", "precompiled", "compiles"}
    assert files(f"steering/{floor}")
    for path in files(f"steering/{floor}"):
        known = {"uniform"} if path.name == "sampler.py" else set()  # random numbers
        found = words_of(path) & (forbidden - known)
        assert not found, f"{path.relative_to(ROOT)} has {sorted(found)}"


def test_the_backend_for_cpus_is_named_by_its_loader_alone() -> None:
    named = {name for name, others in graph().items() if any(f"{one}.".startswith("steering.cpu.") for one in others)}
    assert {name for name in named if not name.startswith("steering.cpu.")} == set()
    loaders = {name for name, path in MODULES.items() if '"steering.cpu"' in path.read_text()}
    assert loaders == {"steering.accel.backend"}


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
        if name.startswith("benchmarks."):
            continue
        for one in parsed(path).classes:
            if not one.startswith("_"):
                found[one].append(name)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
