"""README and docs by what a reader does with them: fenced blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from tests.server.test_cli import ALL

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("demo/**/*.md"), *ROOT.glob("benchmarks/*.md")])


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return [Block(token.info.strip(), token.content) for token in tokens if token.type == "fence"]


def spans(page: Path) -> list[str]:
    """Return the code spans within sentences and tables."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    return [child.content for token in tokens for child in token.children or () if child.type == "code_inline"]


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, each whole, however many lines it has."""
    found, command = [], ""
    for line in text.replace("\\\n", " ").splitlines(keepends=True):
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation that goes on
            continue
        if words:
            found.append(command)
        command = ""
    assert not command, f"a quotation without an end: {command}"
    return found


def is_helmsight(words: Sequence[str]) -> bool:
    return Path(words[0]).name == "helmsight" and "|" not in words


def called(words: Sequence[str]) -> tuple[list[str], Any, list[str]]:
    """Return the names that lead to the command that words call, the command, and its own words."""
    path: list[str] = []
    command, own = ALL["helmsight"], list(words)
    while own and own[0] in getattr(command, "commands", {}):
        path.append(own.pop(0))
        command = command.commands[path[-1]]
    return path, command, own


def options() -> set[str]:
    """All options of all commands."""
    return {n for one in ALL.values() for each in one.params for n in (*each.opts, *each.secondary_opts)} | {"--help"}


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
