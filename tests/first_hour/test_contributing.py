"""CONTRIBUTING.md: its recipes name files and things that exist, and hooks and workflow run what it says they run."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.first_hour.pages import ROOT, blocks, commands, spans
from tests.test_words import MOST_WORDS, OPENINGS, docstrings

PAGE = ROOT / "CONTRIBUTING.md"
TEXT = PAGE.read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["suite"]
PLACES = (
    ROOT,
    ROOT / "tests",
    ROOT / "tests/server",
    ROOT / "tests/server/deploy",
    ROOT / "tests/families",
    ROOT / "probes/vsr",
)
"""The folders that paths of the page start from, beside those of its recipes."""
MADE = ("NAME", "VERSION", "~")
"""Parts of paths that are a reader's own."""


def targets() -> set[str]:
    return set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))


def paths() -> list[str]:
    """Return the files and folders that code spans name."""
    named = {word.rstrip(",;") for span in spans(PAGE) for word in span.split()}
    return sorted(
        word
        for word in named
        if ("/" in word or re.search(r"\.(py|toml|md|yml|yaml)$", word))
        and not re.search(r"[=:]|^/|" + "|".join(MADE), word)
    )


@pytest.mark.parametrize("path", paths())
def test_a_path_of_the_page_exists(path: str) -> None:
    rooms = {(ROOT / named).parent for named in re.findall(r"[\w/]+/NAME\.py", TEXT)}
    assert any((place / path).exists() for place in (*PLACES, *rooms))


def test_paths_are_read_from_the_page() -> None:
    assert len(paths()) > 40
    assert {"steering/interventions/registry.py", "deploy/helmsight.toml", "replicas/test_cluster.py"} < {*paths()}


def test_a_name_is_in_the_file_that_it_is_said_to_be_in() -> None:
    said = re.findall(r"`(\w+)`(?: \(or `(\w+)`\))?[^`.;]{0,30} (?:in|of) `([\w/]+\.py)`", TEXT)
    assert {"Signal", "ChatRequest", "COMMANDS", "ELSEWHERE", "FLOORS", "FIELDS"} < {first for first, _, _ in said}
    for first, second, file in said:
        text = (ROOT / file if (ROOT / file).exists() else ROOT / "tests/families" / file).read_text()
        for name in filter(None, (first, second)):
            assert re.search(rf"\b{name}\b", text), f"{name} in {file}"


def test_modules_that_are_run_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", TEXT)) - {"build"}
    assert {"benchmarks.versions", "tests.durations", "server.commands.example"} < modules
    assert {module for module in modules if find_spec(module) is None} == set()


def test_the_blocks_are_commands_of_a_checkout_and_examples_in_pairs() -> None:
    shown = blocks(PAGE)
    words = [command.split() for block in shown if block.language == "sh" for command in commands(block.text)]
    assert [command[0] for command in words] == ["git", "cd", "make"]
    assert {command[1] for command in words if command[0] == "make"} <= targets()
    examples = [block.text for block in shown if block.language == "python"]
    assert len(examples) == 6
    trees = [ast.parse(text) for text in examples]
    before, after = ([text for tree in trees[side::2] for text in docstrings(tree)] for side in (0, 1))
    assert [text.split()[0] in OPENINGS for text in (*before, *after)] == [True, False]
    assert len(after[0].split()) <= MOST_WORDS
    code = [ast.dump(tree) for tree in trees]
    assert code[4] == code[5], "the third example is about a comment"


def lint() -> set[str]:
    """Return the programs that `make lint` runs, with their subcommands."""
    makefile = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"(?m)^(style|types): .*\n((?:\t.*\n)+)", makefile)
    assert f"\nlint: {' '.join(target for target, _ in recipes)}\n" in makefile
    lines = [line for _, recipe in recipes for line in recipe.splitlines()]
    return {re.sub(r"(\s(-|\.).*)|\$\(BIN\)/|\t", "", line) for line in lines}


def test_hooks_run_what_lint_runs_in_the_same_environment() -> None:
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    entries = {hook["entry"] for hook in local["hooks"]}
    assert all(entry.startswith(".venv/bin/") for entry in entries)
    assert {re.sub(r" --.*", "", entry).removeprefix(".venv/bin/") for entry in entries} == lint()
    assert lint() == {"ruff check", "ruff format", "codespell", "oxlint", "mypy"}


def test_the_workflow_runs_ci_on_every_python_that_the_page_names() -> None:
    pythons = WORKFLOW["strategy"]["matrix"]["python"]
    assert pythons == re.findall(r"3\.\d+", TEXT[TEXT.index("is written") :])[: len(pythons)]
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    assert pythons == re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert pythons == re.findall(r"(?m)^\| (3\.\d+) \|", TEXT)
    assert [step["run"] for step in WORKFLOW["steps"] if "run" in step][-1] == ".ci/run"


@pytest.mark.parametrize("file", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda file: file.name)
def test_issue_forms_are_forms(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    if file.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [part["id"] for part in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])


def test_what_a_release_changes_says_one_version() -> None:
    version = PROJECT["version"]
    section = TEXT[TEXT.index("set the version in") :].partition("\n3.")[0]
    files = re.findall(r"`([\w./-]+\.(?:toml|cff|yaml))`", section)
    assert len(files) == 4
    for file in files:
        assert version in (ROOT / file).read_text(), file
