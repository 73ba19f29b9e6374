"""A newcomer's first hour: README's blocks in order, both pages in a browser, then the commands of the docs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.settings import DEFAULT_JOURNAL
from tests.first_hour.pages import PAGES, ROOT, blocks, called, options, options_in, spans
from tests.first_hour.reader import NO_PROGRAMS, NOT_HERE, Reader, furnish
from tests.server.process.servers import Server
from tests.server.web.browser import Visit
from tests.server.web.pages.axe import everywhere
from tests.server.web.playing import GREEN, pick, send, steer

FOLLOWED = ("README.md", "docs/protocol.md", "docs/study.md", "docs/operate.md")
ELSEWHERE = {
    "docs/batch.md": "tests/server/batches/test_batch_page.py",
    "docs/conditions.md": "tests/probes/gate/test_gate.py",
    "docs/dialects.md": "tests/server/dialects/test_dialects_page.py",
    "docs/observe.md": "tests/server/observe/test_observe_page.py",
    "docs/library.md": "tests/steering/test_library.py",
    "docs/extending.md": "tests/server/test_toys.py",
    "docs/operations.md": "tests/server/telemetry/test_logs.py",
    "docs/production.md": "tests/first_hour/test_production.py",
    "docs/tuning.md": "tests/benchmarks/test_benchmarks.py",
    "benchmarks/README.md": "tests/benchmarks/test_load.py",
    "CONTRIBUTING.md": "tests/first_hour/test_contributing.py",
}
"""Pages whose blocks another test runs, or compares with files that run."""

UNREAL = {"helmsight eval toy": "the benchmark that docs/extending.md shows how to write"}


OF_VLLM = {
    "--max-num-seqs", "--max-model-len", "--limit-mm-per-prompt", "--gpu-memory-utilization", "--tensor-parallel-size",
    "--data-parallel-size", "--decode-context-parallel-size", "--api-server-count", "--enable-dbo",
    "--kv-sharing-fast-prefill", "--scheduler-cls",
}  # fmt: skip
"""Options of `vllm serve`, which docs/vllm.md names beside Helmsight's own."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server as `make serve` does, with a home of its own, whatever earlier tests set for theirs."""
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--allow-uploads"]
    environ = {"HOME": str(home), "HELMSIGHT_JOURNAL": DEFAULT_JOURNAL}
    running = Server(command, home / "server.log", **environ).wait_until_ready()
    yield running
    running.end()


@pytest.fixture(scope="module")
def reader(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Return a newcomer who has followed the README, which shows one output, the one that is printed."""
    reader = Reader(server.log.parent, tmp_path_factory.mktemp("first"), server.url)
    furnish(reader)
    assert reader.follow("README.md") == 1
    return reader


@pytest.mark.slow
def test_every_block_of_the_pages_runs_and_prints_what_they_show(reader: Reader) -> None:
    assert sum(reader.follow(page) for page in FOLLOWED[1:]) >= 1
    assert reader.left_out == set(NOT_HERE), "what is left out stands on a page"


@pytest.mark.slow
def test_both_pages_in_every_look(reader: Reader, chromium: Any) -> None:
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    visit = Visit(context)
    page = visit.page
    page.goto(reader.url)
    page.wait_for_selector(".sample")
    assert everywhere(page, main="#helm") == []
    pick(page, GREEN)
    steer(page, -1)
    assert visit.uncovered("#helm")
    assert send(page) == "The star is green."
    page.goto(f"{reader.url}/dashboard")
    page.wait_for_selector("table tbody tr")
    assert page.locator("table tbody tr").count() >= 4, "README's answers and this one"
    assert everywhere(page, main="table tbody tr") == []
    visit.check()
    context.close()


@pytest.mark.slow
def test_the_readme_in_javascript(reader: Reader) -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("Node is not installed")
    install = ["npm", "install", "--silent", "openai@6"]
    try:
        subprocess.run(install, cwd=reader.folder, capture_output=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        pytest.skip("npm has no openai here")
    (script,) = [block for block in blocks(ROOT / "README.md") if block.language == "js"]
    assert reader.program(script) == "The green object is a heart."


def test_no_block_is_forgotten() -> None:
    shown = {str(page.relative_to(ROOT)) for page in PAGES if blocks(page)}
    assert shown == {*FOLLOWED, *ELSEWHERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / test).read_text()
    languages = {(page, block.language) for page in FOLLOWED for block in blocks(ROOT / page)}
    assert {one for one in languages if one[1] not in ("sh", "python", "text", "")} == set(NO_PROGRAMS)


def test_commands_and_options_within_sentences_exist() -> None:
    known, named = options(), 0
    for page in PAGES:
        for span in spans(page) if page.parent.name != "benchmarks" else ():  # which tell of the past, too
            assert options_in(span) <= (known | OF_VLLM if page.name == "vllm.md" else known), f"{span} in {page.name}"
            if span.startswith("helmsight ") and span not in UNREAL:
                _, command, own = called(shlex.split(span.partition(" | ")[0])[1:])
                assert not (own and hasattr(command, "commands")), f"{span} in {page.name}"
                named += 1
    assert named >= 8
    assert known.isdisjoint(OF_VLLM)
    assert set().union(*map(options_in, spans(ROOT / "docs" / "vllm.md"))) >= OF_VLLM


def test_what_is_made_stands_in_the_makefile() -> None:
    """Wherever somebody is sent to `make` something, by a page, a test or a workflow."""
    targets = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
    places = [*PAGES, *ROOT.glob(".ci/*"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("deploy/*"), ROOT / "Makefile"]
    named = {
        (target, str(place.relative_to(ROOT)))
        for place in places
        if place.is_file()
        for target in re.findall(r"`make ([\w-]+)|^(?:\$ )?make ([\w-]+)$", place.read_text(errors="replace"), re.M)
    }
    assert len(named) > 5
    assert [(words, place) for words, place in sorted(named) if not targets.issuperset(filter(None, words))] == []
