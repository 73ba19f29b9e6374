"""docs/production.md: its ten lines are run as they stand, one after the other in one shell, on a small model."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from demo import CHECKPOINT
from tests.first_hour.pages import ROOT, blocks
from tests.ports import own_port
from tests.server.process.servers import PATIENCE
from tests.waiting import wait_for

PAGE = ROOT / "docs" / "production.md"
LINES = next(block.text for block in blocks(PAGE) if block.language == "sh").splitlines()
FILES = {block.language: block.text for block in blocks(PAGE) if block.language != "sh"}
MODEL = "/models/Qwen2.5-VL-7B-Instruct"
QUESTION = {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 4}


class Operator:
    """Somebody with a shell, a home and a folder of their own, who types the page's lines."""

    def __init__(self, folder: Path):
        self.folder, self.home = folder / "work", folder / "home"
        self.port, self.watched = own_port(), own_port()
        self.home.mkdir()
        shutil.copytree(ROOT / "deploy" / "monitoring", self.folder / "deploy" / "monitoring")
        for name, text in (("helmsight.toml", FILES["toml"]), ("prometheus.yml", FILES["yaml"])):
            (self.folder / name).write_text(self.here(text))
        for place in ("bin", "new/bin"):  # both environments are this one
            program = self.folder / place / "helmsight"
            program.parent.mkdir(parents=True)
            program.write_text(f'#!/bin/sh\nexec {sys.executable} -m server.cli "$@"\n')
            program.chmod(0o755)
        environ = {
            "HOME": str(self.home), "PATH": f"{self.folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "HELMSIGHT_PORT": str(self.port), "HELMSIGHT_JOURNAL": str(self.home / ".helmsight" / "journal.db"),
            "HELMSIGHT_THREADS": "1", "HELMSIGHT_COMPILED": "false", "NO_COLOR": "1",
        }  # fmt: skip
        self.shell = subprocess.Popen(
            ["bash"], cwd=self.folder, env=os.environ | environ, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def here(self, text: str) -> str:
        """Return a text with this machine's ports, and the embedded model in the place of the page's."""
        text = (
            text.replace(":8000", f":{self.port}").replace(":9090", f":{self.watched}").replace(MODEL, str(CHECKPOINT))
        )
        return text.replace(
            "scrape_configs:", "global: {scrape_interval: 1s, evaluation_interval: 1s}\nscrape_configs:"
        )

    def types(self, line: str) -> str:
        """Return what a line prints, which must succeed."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(f"{self.here(line)}\nstatus=$?; echo; echo status $status\n")
        self.shell.stdin.flush()
        printed = ""
        while not (ended := re.search(r"(?m)^status (\d+)\n$", printed)):
            read = self.shell.stdout.readline()
            assert read, f"{line}\n{printed}"
            printed += read
        assert ended[1] == "0", f"{line}\n{printed}"
        return printed[: ended.start()].strip()

    def leaves(self) -> None:
        """End what still runs, and the shell."""
        self.shell.communicate("kill $(jobs -p) $(cat helmsight.pid); wait\n", timeout=PATIENCE)

    def key(self, name: str) -> dict[str, str]:
        file = self.folder / name
        assert file.stat().st_mode & 0o777 == 0o600
        return {"Authorization": f"Bearer {file.read_text().strip()}"}

    def asks(self, key: dict[str, str]) -> int:
        return requests.post(
            f"{self.url}/v1/chat/completions", json=QUESTION, headers=key, timeout=PATIENCE
        ).status_code

    def is_ready(self) -> bool:
        try:
            return requests.get(f"{self.url}/ready", timeout=PATIENCE).ok
        except requests.ConnectionError:
            return False

    def watches(self, path: str) -> Any:
        """Return Prometheus' answer; None until it has started."""
        try:
            answer = requests.get(f"http://127.0.0.1:{self.watched}/api/v1/{path}", timeout=PATIENCE)
        except requests.ConnectionError:
            return None
        return answer.json().get("data") if answer.ok else None


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    operator = Operator(tmp_path)
    yield operator
    operator.leaves()


def test_the_page_has_ten_lines_and_says_what_each_is_for() -> None:
    assert len(LINES) == 10
    table = re.findall(r"(?m)^\| (\d+) \| .+ \| \[.+\]\(.+\) \|$", PAGE.read_text())
    assert table == [str(number) for number in range(1, 11)]
    words = ["keys", "serve", "journal", "prometheus", "backup", "rotate", "doctor", "new/bin/helmsight"]
    assert [word for word in words if not any(word in line for line in LINES)] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_the_ten_lines_from_a_key_to_an_upgrade(operator: Operator) -> None:
    shop, prometheus, doctor, serve, watch, summary, backup, rotate, doctor_of_new, upgrade = LINES
    operator.types(shop)
    operator.types(prometheus)
    assert "problem" not in operator.types(doctor)

    operator.types(serve)
    wait_for(operator.is_ready, PATIENCE)
    old, watching = operator.key("shop.key"), operator.key("prometheus.key")
    assert [operator.asks(key) for key in (old, watching, {})] == [200, 403, 401]
    assert requests.get(f"{operator.url}/metrics", headers=watching, timeout=PATIENCE).ok

    operator.types(watch)
    up = "query?query=up{job='helmsight'}"
    wait_for(
        lambda: ((operator.watches(up) or {}).get("result") or [{"value": [0, "0"]}])[0]["value"][1] == "1", PATIENCE
    )
    rules = [rule for group in operator.watches("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert {"HelmsightDown", "HelmsightAnswersLookUnfaithful"} <= {rule["name"] for rule in rules}

    assert operator.types(summary).startswith("1 answers (")
    operator.types(backup)
    (copy,) = operator.folder.glob(f"journal-{time.strftime('%Y')}-*.db")
    assert copy.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(copy)) as journal:
        assert journal.execute("SELECT count(*), min(key_name) FROM helmsight_journal").fetchall() == [(1, "shop")]

    operator.types(rotate)
    new = operator.key("shop-new.key")
    assert new != old
    assert [operator.asks(key) for key in (old, new)] == [200, 200]

    assert "problem" not in operator.types(doctor_of_new)
    process = (operator.folder / "helmsight.pid").read_text()
    operator.types(upgrade)
    assert (operator.folder / "helmsight.pid").read_text() != process
    wait_for(operator.is_ready, PATIENCE)
    assert [operator.asks(key) for key in (old, new)] == [200, 200], "keys and the overlap outlive the restart"
    assert operator.types(summary).startswith("5 answers (")
