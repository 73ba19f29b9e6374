"""The house's rules: rooms import only rooms before them, and the server touches no private name of the engine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import steering

ROOT = Path(__file__).parents[2]
ROOMS = ("steering", "probes", "demo", "server")
FILES = [(room, path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def trees(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    for room, path in FILES:
        if room in rooms:
            yield path, ast.parse(path.read_text(), str(path))


def imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) of every import, also those inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or "", tuple(alias.name for alias in node.names)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for path, tree in trees(room):
        for module, _ in imports(tree):
            assert module.partition(".")[0] not in later, f"{path.relative_to(ROOT)} imports {module}"


def test_flask_lives_in_the_server_only() -> None:
    web = {"flask", "werkzeug", "gunicorn", "prometheus_client"}
    for path, tree in trees("steering", "probes", "demo"):
        for module, _ in imports(tree):
            assert module.partition(".")[0] not in web, f"{path.relative_to(ROOT)} imports {module}"


def test_the_server_imports_no_private_name_of_another_room() -> None:
    for path, tree in trees("server"):
        for module, names in imports(tree):
            if module.partition(".")[0] in ROOMS[:-1]:
                private = [name for name in (*module.split("."), *names) if name.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {private} from {module}"


def test_the_server_touches_private_attributes_of_nothing_but_itself() -> None:
    for path, tree in trees("server"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                documented = isinstance(node.value, ast.Name) and (node.value.id, node.attr) == ("os", "_exit")
                assert own or documented, f"{path.relative_to(ROOT)}:{node.lineno} touches .{node.attr}"


INSIDE = ("steering.engine", "steering.model", "steering.decoder", "steering.prompt", "steering.auto")
LOADERS = {"server/process/local.py", "server/process/preflight.py", "server/commands/vectors.py"}
"""Who loads or looks at a checkpoint for Helmsight's own engine; nothing else knows that it is the one that serves."""
WORDS = {"Auto", "Criterion", "TextBounds"}
"""Types that stand in the protocol."""


def test_the_server_knows_an_engine_by_its_protocol_alone() -> None:
    for path, tree in trees("server"):
        if str(path.relative_to(ROOT)) in LOADERS:
            continue
        named = {name for module, names in imports(tree) if module == "steering" for name in names}
        named |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "steering"
        }
        homes = {name: getattr(getattr(steering, name, None), "__module__", "") for name in named - WORDS}
        inner = [name for name, home in homes.items() if home.startswith(INSIDE)]
        assert not inner, f"{path.relative_to(ROOT)} uses {inner}"
        for module, _ in imports(tree):
            assert not module.startswith(INSIDE), f"{path.relative_to(ROOT)} imports {module}"


def test_the_server_touches_no_model() -> None:
    for path, tree in trees("server"):
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "mllm" not in names or str(path.relative_to(ROOT)) in LOADERS, f"{path.relative_to(ROOT)} touches .mllm"


def test_no_pickle_anywhere() -> None:
    for path, tree in trees(*ROOMS):
        for module, _ in imports(tree):
            assert module.partition(".")[0] not in {"pickle", "dill", "joblib", "shelve", "marshal"}, path
