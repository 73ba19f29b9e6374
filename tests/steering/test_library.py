"""The library as its users meet it: what is public, what it says of itself, and the page that shows it."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest

import steering
from demo.world.scenes import random_scene, render

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "library.md"


def test_what_is_public_is_listed_and_nothing_else() -> None:
    assert dir(steering) == sorted(steering.__all__)
    for name in dir(steering):
        getattr(steering, name)


def test_every_public_name_says_what_it_is() -> None:
    for name in steering.__all__:
        one = getattr(steering, name)
        if inspect.isclass(one) or inspect.isfunction(one):
            about = inspect.getdoc(one) or ""
            assert about.endswith((".", '"')), f"{name} says nothing of itself"
            assert len(about) > 30, name
            assert not re.match(rf"{name}\(", about), f"{name} has but the signature that dataclasses write"
            continue
        assert said().get(name), f"nothing is said of {name}"


@functools.cache
def said() -> dict[str, str]:
    """Return the docstring of each constant."""
    found: dict[str, str] = {}
    for path in (ROOT / "steering").rglob("*.py"):
        if path.name == "__init__.py":
            continue
        for one, after in itertools.pairwise(ast.parse(path.read_text()).body):
            if (
                isinstance(one, ast.Assign)
                and isinstance(one.targets[0], ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found.setdefault(one.targets[0].id, str(after.value.value))
    return found


@pytest.mark.parametrize("name", [name for name in steering.__all__ if inspect.isclass(getattr(steering, name))])
def test_every_public_method_says_what_it_does(name: str) -> None:
    kind = getattr(steering, name)
    for method, one in vars(kind).items():
        function = one.fget if isinstance(one, property) else getattr(one, "__func__", one)
        if method.startswith("_") or not inspect.isfunction(function):
            continue
        assert inspect.getdoc(getattr(kind, method)), f"{name}.{method} says nothing"


def blocks() -> list[tuple[str, str]]:
    """(code, what it prints) of the page."""
    return re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    render(random_scene(random.Random("scene 5"), held_out=True), (84, 84)).save("scene.png")
    namespace: dict[str, Any] = {}
    found = blocks()
    assert len(found) == PAGE.read_text().count("```python") == 9
    for code, printed in found:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, str(PAGE), "exec"), namespace)
        assert out.getvalue() == printed
    built, contrast = namespace["own"], namespace["contrast"]
    assert steering.SteeringVector.load("my-contrast.safetensors").layers == contrast.layers
    # The probe draws which option stands first; the direction is the same but for that.
    layer = contrast.layers[0]
    assert float(built.direction[layer] @ contrast.direction[layer]) > 0.9 * float(
        built.direction[layer].norm() * contrast.direction[layer].norm()
    )


def test_the_embedded_model_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mllm = steering.load()
    assert (mllm.name, mllm.path) == ("helmsight-demo", ROOT / "demo" / "checkpoint")
