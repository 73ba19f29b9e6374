"""The first hour for real: a clone of the last commit, `make serve`, README's blocks, `make test`.

Each block is run by its language's program.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.first_hour.pages import ROOT, Block
from tests.first_hour.reader import Reader, furnish
from tests.server.process.servers import Server


class Newcomer(Reader):
    """A reader whose `helmsight` is the one that `make serve` installed."""

    def helmsight(self, words: Sequence[str]) -> str:
        if words[0] == "serve":  # which would go on; the server that runs was started by it
            return ""
        return self.program(Block("sh", shlex.join(["helmsight", *words])))


@pytest.mark.long
def test_a_clone_serves_what_the_readme_shows_and_passes_its_tests(tmp_path: Path) -> None:
    clone, home = tmp_path / "clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    environ = {"HOME": str(home), "PYTHONPATH": "", "VIRTUAL_ENV": ""}
    serve = ["make", "--directory", str(clone), "serve"]
    server = Server(serve, tmp_path / "server.log", **environ).wait_until_ready(seconds=1800)
    try:
        newcomer = Newcomer(home, tmp_path, server.url, clone / ".venv" / "bin" / "python")
        newcomer.environ["PYTHONPATH"] = ""
        furnish(newcomer)
        assert newcomer.follow("README.md") == 1
    finally:
        server.end()
    test = ["make", "--directory", str(clone), "test"]
    assert subprocess.run(test, env=os.environ | environ, check=False).returncode == 0
