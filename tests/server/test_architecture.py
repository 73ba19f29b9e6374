"""The house's rules: rooms import only rooms before them, and the server touches no private name of the engine."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import steering
from server import serving
from tests.test_house import files, parsed

ROOT = Path(__file__).parents[2]
ROOMS = ("steering", "probes", "demo", "server")


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (module, names) of every import of a file, also of those inside functions."""
    for module, names in parsed(path).imports:
        assert not module.startswith("."), "imports are absolute"
        yield module, names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for path in files(room):
        for module, _ in imports(path):
            assert module.partition(".")[0] not in later, f"{path.relative_to(ROOT)} imports {module}"


def test_flask_lives_in_the_server_only() -> None:
    web = {"flask", "werkzeug", "gunicorn", "prometheus_client"}
    for path in files("steering", "probes", "demo"):
        for module, _ in imports(path):
            assert module.partition(".")[0] not in web, f"{path.relative_to(ROOT)} imports {module}"


def test_the_server_imports_no_private_name_of_another_room() -> None:
    for path in files("server"):
        for module, names in imports(path):
            if module.partition(".")[0] in ROOMS[:-1]:
                private = [name for name in (*module.split("."), *names) if name.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {private} from {module}"


def test_the_server_touches_private_attributes_of_nothing_but_itself() -> None:
    for path in files("server"):
        for of, name, line in parsed(path).attributes:
            if name.startswith("_") and not name.startswith("__"):
                own, documented = of in ("self", "cls"), (of, name) == ("os", "_exit")
                assert own or documented, f"{path.relative_to(ROOT)}:{line} touches .{name}"


INSIDE = (
    "steering.core",
    "steering.front",
    "steering.child",
    "steering.model",
    "steering.decoder",
    "steering.prompt",
    "steering.auto",
)
LOADERS = {
    "server/engine/local.py",
    "server/engine/vllm.py",
    "server/engine_process/process.py",
    "server/process/preflight.py",
    "server/commands/vectors.py",
}
"""Files that load or inspect a checkpoint, for Helmsight's own engine or in front of vLLM; no others know which serves."""
WORDS = {"Auto", "Criterion", "Gate", "GateTerm", "Gated", "NumberCondition", "TextBounds", "conditioned"}
"""The parts of requests for any engine, which stand in the protocol."""


def test_the_server_knows_an_engine_by_its_protocol_alone() -> None:
    for path in files("server"):
        if str(path.relative_to(ROOT)) in LOADERS:
            continue
        named = {name for module, names in imports(path) if module == "steering" for name in names}
        named |= {name for of, name, _ in parsed(path).attributes if of == "steering"}
        homes = {name: getattr(getattr(steering, name, None), "__module__", "") for name in named - WORDS}
        inner = [name for name, home in homes.items() if home.startswith(INSIDE)]
        assert not inner, f"{path.relative_to(ROOT)} uses {inner}"
        for module, _ in imports(path):
            assert not module.startswith(INSIDE), f"{path.relative_to(ROOT)} imports {module}"


def test_the_server_touches_no_model() -> None:
    for path in files("server"):
        names = {name for _, name, _ in parsed(path).attributes}
        assert "mllm" not in names or str(path.relative_to(ROOT)) in LOADERS, f"{path.relative_to(ROOT)} touches .mllm"


def test_no_pickle_anywhere() -> None:
    for path in files(*ROOMS):
        for module, _ in imports(path):
            assert module.partition(".")[0] not in {"pickle", "dill", "joblib", "shelve", "marshal"}, path


def test_what_takes_seconds_to_import_is_imported_before_processes_are_forked() -> None:
    tree = ast.parse(inspect.getsource(serving.import_ahead))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported >= {"server.app", "server.engine.runtime", "server.engine_process.process"}
