"""Docstrings open as those of the field's projects do."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.test_house import files

OPENINGS = {
    "As", "By", "Has", "How", "If", "Is", "It", "Its", "Made", "Of", "One", "Some", "So", "Such", "Than", "That", "They",
    "Those", "What", "When", "Where", "Whether", "Which", "Who", "Whose",
}  # fmt: skip
"""First words of sentences that have to be read twice."""
MOST_WORDS = 25
"""Words of a first sentence."""


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield those of a file: of its classes and functions, and the strings behind its constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text
            if isinstance(node, ast.Module | ast.ClassDef):
                for before, after in zip(node.body, node.body[1:], strict=False):
                    match before, after:
                        case ast.Assign() | ast.AnnAssign(), ast.Expr(ast.Constant(str(text))):
                            yield text


@pytest.mark.parametrize("package", ["steering", "server", "probes", "demo", "benchmarks", "tests", "vllm"])
def test_docstrings_open_with_a_plain_short_sentence(package: str) -> None:
    every, odd = 0, []
    for path in files(package):
        for text in docstrings(ast.parse(path.read_text())):
            first = text.split("\n\n")[0].split(". ")[0].split()
            every += 1
            if first[0].strip(",:") in OPENINGS or len(first) > MOST_WORDS:
                odd.append(f"{path}: {text[:80]}")
    assert len(odd) <= 0.02 * every, "\n".join(odd)
