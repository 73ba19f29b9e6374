"""The blocks of docs/dialects.md run and print what the page shows, each where its package is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from werkzeug.serving import make_server

import steering
from server.app import create_app
from server.settings import Settings
from tests.first_hour.pages import ROOT, blocks
from tests.first_hour.reader import alike

PAGE = [block for block in blocks(ROOT / "docs" / "dialects.md") if block.language in ("python", "js", "text")]
SHOWN = list(zip(PAGE[::2], PAGE[1::2], strict=True))


@pytest.fixture(scope="module")
def address(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server that stores responses."""
    journal = str(tmp_path_factory.mktemp("journal") / "journal.db")
    server = make_server("127.0.0.1", 0, create_app(Settings(journal=journal), engine=engine), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


def assert_prints(program: list[str], package: str, address: str, folder: Path) -> None:
    """Run a program of the page, whose text follows `program`, and compare what it prints with the block behind it."""
    ((code, shown),) = [pair for pair in SHOWN if f"from {package}" in pair[0].text]
    scene = [sys.executable, "-m", "server.cli", "demo", "scene", "--seed", "5", "--out", "scene.png"]
    subprocess.run(scene, cwd=folder, check=True, capture_output=True)
    text = code.text.replace("127.0.0.1:8000", address)
    done = subprocess.run([*program, text], cwd=folder, capture_output=True, text=True, check=False)
    assert alike(done.stdout, shown.text), done.stdout + done.stderr


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_the_page_shows_what_its_program_prints(address: str, package: str, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert_prints([sys.executable, "-c"], f"{package} import", address, tmp_path)


@pytest.mark.slow
def test_the_page_shows_what_its_program_in_javascript_prints(address: str, tmp_path: Path) -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("Node is not installed")
    install = ["npm", "install", "--silent", "ai@6", "@ai-sdk/openai-compatible@2"]
    try:
        subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        pytest.skip("npm has no AI SDK here")
    assert_prints(["node", "--input-type=module", "-e"], '"ai"', address, tmp_path)


def test_its_programs_in_python_can_be_read() -> None:
    programs = [code.text for code, _ in SHOWN if code.language == "python"]
    assert len(programs) == 2
    for text in programs:
        compile(text, "docs/dialects.md", "exec")
