"""The package as others install it: what its wheel holds, and what it does from there, far from any clone."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.first_hour.pages import ROOT
from tests.server.process.servers import Server

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ROOMS = ("steering", "probes", "demo", "server")
LEFT_OUT = ("demo/reports/", "demo/REPORT.json")
"""Files of the rooms that are meant for readers of the repository."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the working tree, as a build leaves folders behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_what_the_rooms_hold(wheel: Path) -> None:
    there = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    wanted = {name for name in there if "__pycache__" not in name and not name.startswith(LEFT_OUT)}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert held == wanted
        assert all(archive.read(name) == (ROOT / name).read_bytes() for name in held if not name.endswith(".py"))
    for name in ("server/static/page.css", "server/templates/base.html", "demo/checkpoint/model.safetensors"):
        assert name in held


def test_the_wheel_asks_for_what_the_project_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        lines = archive.read(f"{info}/METADATA").decode().splitlines()
        scripts = configparser.ConfigParser()
        scripts.read_string(archive.read(f"{info}/entry_points.txt").decode())
        assert f"{info}/licenses/LICENSE" in archive.namelist()
    asked = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    assert {(one.name, one.specifier) for one in asked if one.marker is None} == {
        (one.name, one.specifier) for one in map(Requirement, PROJECT["dependencies"])
    }
    assert dict(scripts["console_scripts"]) == PROJECT["scripts"]
    assert f"Requires-Python: {PROJECT['requires-python']}" in lines


@pytest.mark.long
def test_a_wheel_serves_probes_and_evaluates_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """In an environment that holds the package's own dependencies and nothing else."""
    folder, home, log = tmp_path / "empty", tmp_path / "home", tmp_path / "server.log"
    folder.mkdir()
    home.mkdir()
    (torch,) = re.findall(r"(?m)^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text())
    environ = {"HOME": str(home), "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", "VIRTUAL_ENV": "", "NO_COLOR": "1"}
    programs = tmp_path / "env" / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", "--no-compile", torch, str(wheel)]
    for command in ([sys.executable, "-m", "venv", str(programs.parent)], install):
        subprocess.run(command, env=os.environ | environ, check=True)

    def helmsight(*words: str) -> str:
        command = ["env", f"--chdir={folder}", *(f"{name}={value}" for name, value in environ.items())]
        done = subprocess.run(
            [*command, str(programs / "helmsight"), *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "packages" in helmsight("doctor")
    served = ["env", f"--chdir={folder}", str(programs / "helmsight"), "serve"]
    server = Server(served, log, **environ).wait_until_ready(seconds=600)
    try:
        _serves(server, helmsight)
    finally:
        server.end()
    assert str(ROOT) not in log.read_text()
    small = ("--calibration-samples", "2", "--strengths", "0.5", "--states", "0", "--layers", "3")
    helmsight("probe", "--samples", "24", *small, "--quiet", "--force", "--use")
    (vector,) = (home / ".helmsight" / "vectors").glob("*.safetensors")
    helmsight("eval", "mc2", "--limit", "1", "--severity", "0.5", "--quiet")
    assert (folder / "build" / "mc2" / "report.html").is_file()
    assert {path.name for path in folder.iterdir()} == {"build", "scene.png"}
    assert vector.stat().st_size > 0


def _serves(server: Server, helmsight: Callable[..., str]) -> None:
    """Answers come, steered; the pages and all that they are made of are there."""
    helmsight("demo", "scene", "--seed", "5", "--out", "scene.png")
    choice = server.post(steering={"toward": "vision"}, diagnostics=True).json()["choices"][0]
    assert choice["message"]["content"]
    assert choice["applied"]["steering"][0]["tokens"] > 0
    for route in ("/", "/dashboard", "/docs", "/vectors", "/model"):
        page = server.get(route)
        assert page.ok, route
        for part in re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text):
            assert server.get(part).ok, f"{part} of {route}"
    samples = server.get("/samples").json()["data"]
    assert samples
    assert all(server.get(f"/samples/{name}").ok for sample in samples for name in sample["images"])
