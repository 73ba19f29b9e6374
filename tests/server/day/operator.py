"""Somebody who runs a server through a day: its process, commands beside it, and a newer version of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

from tests.ports import own_port
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
START = 120.0
"""Seconds that a start may take on a busy machine."""

SETTINGS = """\
named_key_file = "~/.helmsight/keys.json"
journal = "~/.helmsight/journal.db"
journal_readouts = ["focus", "modality", "alarm"]
log_format = "json"
compiled = false
threads = 1
"""

REVISION = "0008"
"""The revision of the journal's tables that the newer version brings."""


class Operator:
    """A home, a folder, a server in it, and the commands of an installation; logs are kept over restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "work", folder / "home"
        for path in (self.folder, self.home):
            path.mkdir()
        (self.folder / "helmsight.toml").write_text(SETTINGS)
        self.newer = newer_version(folder / "newer")
        self.port = own_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.starts: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None

    def environ(self, newer: bool = False) -> dict[str, str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith(("HELMSIGHT_", "OPENAI_"))}
        sources = [str(ROOT), *([str(self.newer)] if newer else [])][::-1]
        return known | {
            "HOME": str(self.home), "PYTHONPATH": os.pathsep.join(sources), "HELMSIGHT_PORT": str(self.port),
            "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
        }  # fmt: skip

    def command(self, *words: str, newer: bool = False, status: int = 0) -> str:
        """Return what a command prints; it must end with that status."""
        done = subprocess.run(
            ["nice", sys.executable, "-m", "server.cli", *words], cwd=self.folder, env=self.environ(newer), text=True,
            capture_output=True, check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == status, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def key(self, *words: str) -> str:
        """Return the key that a command prints."""
        return self.command("keys", *words, "--file", str(self.home / ".helmsight" / "keys.json")).strip()

    def serve(self, newer: bool = False) -> None:
        """Start a server, and wait until it is ready."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "server.cli", "serve", "--config", "helmsight.toml"],
                cwd=self.folder, env=self.environ(newer), stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.starts.append(time.time())
        wait_for(self.is_ready, START)

    def stop(self) -> None:
        """End the server as a service manager does, and wait until it has ended."""
        if self._process is not None:
            self._process.terminate()
            assert self._process.wait(START) == 0
            self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START)

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-4000:]
        try:
            return requests.get(f"{self.url}/ready", timeout=10).ok
        except requests.RequestException:
            return False

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of all servers' logs."""
        read = []
        for line in self.log.read_text().splitlines():
            try:
                read.append(json.loads(line))
            except ValueError:
                continue  # the progress of loading
        return read

    def logged(self, words: str) -> list[dict[str, Any]]:
        """Return the lines whose message has these words."""
        return [line for line in self.lines() if words in line.get("message", "")]

    def rows(self, *filters: str, newer: bool = False) -> list[dict[str, Any]]:
        """Return the journal's rows as `helmsight journal export` writes them."""
        text = self.command("journal", "export", "--config", "helmsight.toml", *filters, newer=newer)
        return [json.loads(line) for line in text.splitlines()]


def newer_version(folder: Path) -> Path:
    """Make a version of the server whose journal has one more column, and return its folder, for the path of modules."""
    shutil.copytree(ROOT / "server", folder / "server", ignore=shutil.ignore_patterns("__pycache__"))
    schema = folder / "server" / "journal" / "schema.py"
    added = f'    "{REVISION}": (Column("weather", String(16), doc="What a newer version notes."),),\n'
    text = schema.read_text()
    end = text.index('}\n"""Columns that were added later')
    schema.write_text(text[:end] + added + text[end:])
    versions = folder / "server" / "journal" / "migrations" / "versions"
    last = sorted(versions.glob("rev_*.py"))[-1]
    number = last.stem.split("_")[1]
    assert int(number) + 1 == int(REVISION), "there is a newer revision: name the one behind it"
    before = str(int(number) - 1).zfill(4)
    script = last.read_text().replace(f'"{number}"', f'"{REVISION}"').replace(f'"{before}"', f'"{number}"')
    (versions / f"rev_{REVISION}_weather.py").write_text(script)
    return folder
