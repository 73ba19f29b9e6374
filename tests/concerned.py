"""Run the tests that a change concerns: `python -m tests.concerned [--since COMMIT] [--seconds N] [OPTIONS OF PYTEST]`.

`make check` calls this. A change is what differs from COMMIT, by default the branch's upstream or else HEAD, with files that
git does not know yet. The nearest tests come first: changed ones; those in the folder that mirrors a changed file's, or that
import it or name it; then those that reach it by more imports. They are taken until they cost too many CPU seconds, by
`tests/DURATIONS.md`.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.durations import ROOT, TABLE, read_table

ROOMS = ("steering", "probes", "demo", "server", "benchmarks", "deploy", "tests")
SECONDS = 100.0
"""CPU seconds of tests: on two cores they, and importing what they need, take about a minute."""
UNKNOWN = 3.0
"""CPU seconds of a file that was never measured."""
ALWAYS = "tests/test_house.py"
OF_PAGES = "tests/test_docs.py"
"""The test of all pages, which names none of them."""
CHANGED, NEAR = 0, 1


def changed_files(since: str | None) -> list[str]:
    """Return the working tree's files that differ from a commit, as paths within the repository."""
    if since is None:
        upstream = _git("rev-parse", "--verify", "--quiet", "@{upstream}")
        since = _git("merge-base", "HEAD", upstream[0])[0] if upstream else "HEAD"
    return sorted({*_git("diff", "--name-only", since), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split("\n")[
        :-1
    ]


@cache
def python_files() -> frozenset[str]:
    return frozenset(str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).rglob("*.py"))


@cache
def imports(file: str) -> frozenset[str]:
    """Return the project's files that a file imports anywhere, with the `conftest.py` files that pytest imports for it.

    Commands import by name what takes seconds: a module that a text names, and the `task.py` beside `command.py`.
    """
    tree = ast.parse((ROOT / file).read_text())
    names = {name for node in ast.walk(tree) for name in _imported(node)}
    candidates = {f"{name.replace('.', '/')}{ending}" for name in names for ending in (".py", "/__init__.py")}
    if Path(file).name == "command.py":
        candidates.add(str(Path(file).with_name("task.py")))
    if file.startswith("tests/"):
        candidates |= {str(folder / "conftest.py") for folder in Path(file).parents}
    return frozenset((candidates & python_files()) - {file})


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
        yield node.value


def distances(changed: str) -> dict[str, int]:
    """Return the number of imports between each file and a changed one; files that do not reach it are left out."""
    found, reached, distance = {changed: CHANGED}, {changed}, 0
    while reached:
        distance += 1
        reached = {file for file in python_files() - found.keys() if imports(file) & reached}
        found |= dict.fromkeys(reached, distance)
    return found


def is_test(file: str) -> bool:
    return file.startswith("tests/") and Path(file).name.startswith("test_") and file.endswith(".py")


def ranks(changed: list[str]) -> dict[str, int]:
    """Return the rank of each concerned test file by its distance from the change; the nearest has 0."""
    tests = sorted(filter(is_test, python_files()))
    found: dict[str, int] = {}
    for file in changed:
        mirror = f"{Path(file).parent}/" if file.startswith("tests/") else f"tests/{Path(file).parent}/"
        near = distances(file) if file.endswith(".py") and (ROOT / file).exists() else {}
        for test in tests:
            close = test.startswith(mirror) and mirror != "tests/./" and not is_test(file)
            named = close or (file.endswith(".md") and test == OF_PAGES)
            named = named or (not file.endswith(".py") and Path(file).name in (ROOT / test).read_text())
            rank = min(near.get(test, len(python_files())), NEAR if named else len(python_files()))
            if rank < len(python_files()):
                found[test] = min(rank, found.get(test, rank))
    return found


def chosen(changed: list[str], seconds: float) -> tuple[list[str], list[str]]:
    """Return the test files to run, and those that are concerned but cost too much."""
    costs = read_table(TABLE.read_text()) if TABLE.exists() else {}
    rank = ranks(changed) | {ALWAYS: CHANGED}

    def cost(test: str) -> float:
        return costs[test].seconds if test in costs else UNKNOWN

    taken, left = [], []
    for test in sorted(rank, key=lambda test: (rank[test], cost(test), test)):
        seconds -= cost(test)
        if seconds < 0 and rank[test] != CHANGED:
            seconds += cost(test)
            left.append(test)
        else:
            taken.append(test)
    return taken, left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", metavar="COMMIT")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given, options = parser.parse_known_args()
    taken, left = chosen(changed_files(given.since), given.seconds)
    print(
        f"{len(taken)} files of tests are run, and {len(left)} more are concerned, which `make test` runs.", flush=True
    )
    return int(pytest.main([*options, *taken]))


if __name__ == "__main__":
    sys.exit(main())
