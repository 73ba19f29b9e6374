"""README and docs: links lead somewhere, and what the pages print is what their commands print."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.server.process.servers import Server

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("demo/**/*.md"), *ROOT.glob("benchmarks/*.md")])
NUMBER = re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return [Block(token.info.strip(), token.content) for token in tokens if token.type == "fence"]


def links(page: Path) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            for name in ("href", "src"):
                if (target := child.attrGet(name)) is not None:
                    yield str(target)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    found = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "http://127.0.0.1")), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} in {page.name}"
        assert not anchor or anchor in anchors(file), f"{target} in {page.name}"


def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (tmp_path / "protocol" / "index.html").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server as `make serve` starts it, with a home of its own, which commands share."""
    home = tmp_path_factory.mktemp("home")
    command = [sys.executable, "-m", "server.cli", "serve", "--threads", "1", "--allow-uploads"]
    running = Server(command, home / "server.log", HOME=str(home)).wait_until_ready()
    yield running
    running.end()


def told(server: Server, block: Block, folder: Path) -> str:
    """What a block prints, run in a folder."""
    port = server.url.rpartition(":")[2]
    text = block.text.replace(":8000", f":{port}").replace(". .venv/bin/activate\n", "")
    programs = {
        "python": [sys.executable, "-c"],
        "sh": ["bash", "-euo", "pipefail", "-c"],
        "js": ["node", "--input-type=module", "-e"],
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {**os.environ, "HOME": str(server.log.parent), "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        [*programs[block.language], text],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stderr}"
    return done.stdout


def check_page(name: str, server: Server, folder: Path) -> int:
    """Run a page's blocks in order, and compare with the output that it prints behind some; how many were compared."""
    page, compared = blocks(ROOT / name), 0
    for block, after in zip(page, [*page[1:], Block("", "")], strict=True):
        if block.language not in ("sh", "python") or re.search(r"/models/|/opt/|^make ", block.text):
            continue
        printed = told(server, block, folder)
        if after.language == "text":
            compared += 1
            assert NUMBER.sub("#", printed) == NUMBER.sub("#", after.text)
            ours, theirs = ([float(number) for number in NUMBER.findall(text)] for text in (printed, after.text))
            assert ours == pytest.approx(theirs, abs=2e-3)
    return compared


@pytest.mark.slow
def test_the_readme_and_the_pages_on_a_running_server(server: Server, tmp_path: Path) -> None:
    assert check_page("README.md", server, tmp_path) == 1
    assert check_page("docs/protocol.md", server, tmp_path) >= 1


@pytest.mark.slow
def test_the_readme_in_javascript(server: Server, tmp_path: Path) -> None:
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("Node is not installed")
    install = ["npm", "install", "--silent", "openai@6"]
    try:
        subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        pytest.skip("npm has no openai here")
    page = blocks(ROOT / "README.md")
    told(server, next(block for block in page if "demo scene" in block.text), tmp_path)
    (script,) = [block for block in page if block.language == "js"]
    assert told(server, script, tmp_path) == "The green object is a heart."
