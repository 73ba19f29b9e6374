"""OpenMP's threads are told how long to spin before torch, which reads it, is loaded; what the user set stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.startup.openmp import BLOCK_TIME, POLICY, SPIN_COUNT, VARIABLES, set_wait_policy

ROOT = Path(__file__).parents[3]
SET = {"GOMP_SPINCOUNT": SPIN_COUNT, "KMP_BLOCKTIME": BLOCK_TIME, "OMP_WAIT_POLICY": POLICY}

IMPOSTOR = """
import json, os, sys
with open(os.environ["SEEN"], "a") as file:
    print(json.dumps(dict(os.environ)), file=file)
os._exit(3)  # with which a worker of gunicorn ends its server
"""
"""A package torch that tells what the first import of it finds, and ends the process."""

COMMANDS = {
    "serve": ["-m", "server.cli", "serve", "--port", "0", "--journal", "off"],
    "gunicorn": ["-m", "gunicorn", "-c", "deploy/gunicorn.conf.py", "server.wsgi:app"],
    "wsgi": ["-c", "import server.wsgi"],
    "probe": ["-m", "server.cli", "probe", "--samples", "1", "--out", "OUT"],
    "eval mc2": ["-m", "server.cli", "eval", "mc2", "--limit", "1", "--out", "OUT"],
    "eval sage": ["-m", "server.cli", "eval", "sage", "--limit", "1"],
    "vectors": ["-m", "server.cli", "vectors", "list"],
    "demo": ["-m", "server.cli", "demo", "evaluate", "--count", "1", "--report", "OUT"],
}


def seen(words: list[str], folder: Path, **environ: str) -> list[dict[str, str]]:
    """Return the environment of every process of a command at its first import of torch."""
    package = folder / "first" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(IMPOSTOR)
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    clean |= {"PYTHONPATH": f"{folder / 'first'}:{ROOT}", "SEEN": str(folder / "seen"), "HOME": str(folder)}
    clean |= {"HELMSIGHT_PORT": "0", "HELMSIGHT_JOURNAL": "off"}
    command = [sys.executable, *(word.replace("OUT", str(folder / "out")) for word in words)]
    subprocess.run(command, cwd=ROOT, env=clean | environ, capture_output=True, timeout=100, check=False)
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_set_before_torch_is_imported(command: str, tmp_path: Path) -> None:
    for environ in seen(COMMANDS[command], tmp_path):
        assert {name: environ.get(name) for name in VARIABLES} == dict.fromkeys(VARIABLES) | SET


def test_what_the_user_set_reaches_torch_unchanged(tmp_path: Path) -> None:
    (environ,) = seen(COMMANDS["probe"], tmp_path, OMP_WAIT_POLICY="ACTIVE")
    assert {name: environ[name] for name in VARIABLES if name in environ} == {"OMP_WAIT_POLICY": "ACTIVE"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, SET),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, {}),
        ({"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": BLOCK_TIME}),
        ({"KMP_BLOCKTIME": "200"}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"KMP_LIBRARY": "turnaround"}, {"GOMP_SPINCOUNT": SPIN_COUNT}),
        ({"GOMP_SPINCOUNT": "infinity", "KMP_BLOCKTIME": "infinite"}, {}),
        ({"OMP_NUM_THREADS": "1"}, SET),
    ],
)
def test_a_variable_of_the_user_wins_for_the_library_that_it_is_for(
    given: dict[str, str], added: dict[str, str]
) -> None:
    environ = dict(given)
    set_wait_policy(environ)
    assert environ == given | added


def test_the_library_that_torch_loads_takes_it() -> None:
    """GNU's library prints what it has read."""
    code = "from server.startup.openmp import set_wait_policy; set_wait_policy(); import torch"
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | {"OMP_DISPLAY_ENV": "VERBOSE"}, capture_output=True, text=True,
        check=True,
    ).stderr  # fmt: skip
    if "GOMP_SPINCOUNT" not in told:
        pytest.skip("torch is built with another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in told
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in told
