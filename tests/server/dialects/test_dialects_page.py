"""The blocks of docs/dialects.md run and print what the page shows, each where its package is installed."""

from __future__ import annotations

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

PAGE = [block for block in blocks(ROOT / "docs" / "dialects.md") if block.language in ("python", "text")]
SHOWN = list(zip(PAGE[::2], PAGE[1::2], strict=True))


@pytest.fixture(scope="module")
def address(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server that stores responses."""
    journal = str(tmp_path_factory.mktemp("journal") / "journal.db")
    server = make_server("127.0.0.1", 0, create_app(Settings(journal=journal), engine=engine), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_the_page_shows_what_its_program_prints(address: str, package: str, tmp_path: Path) -> None:
    ((code, shown),) = [pair for pair in SHOWN if f"from {package} import" in pair[0].text]
    assert [block.language for block in (code, shown)] == ["python", "text"]
    compile(code.text, "docs/dialects.md", "exec")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    scene = [sys.executable, "-m", "server.cli", "demo", "scene", "--seed", "5", "--out", "scene.png"]
    subprocess.run(scene, cwd=tmp_path, check=True, capture_output=True)
    text = code.text.replace("127.0.0.1:8000", address)
    done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert alike(done.stdout, shown.text), done.stdout + done.stderr
