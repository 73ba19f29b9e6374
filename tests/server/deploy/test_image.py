"""The image agrees with the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import steering
from server.process.sources import PREFIX
from server.settings import Settings
from steering.core import compilation

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()


def test_the_image_sets_only_variables_that_exist() -> None:
    names = set(re.findall(rf"\b{PREFIX}(\w+)=", DOCKERFILE))
    assert names
    assert names <= {name.upper() for name in Settings.model_fields}


def test_the_image_holds_every_package_and_the_same_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for room in project["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert f"COPY {room.rstrip('*')} " in DOCKERFILE
    (torch,) = re.findall(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert f'ARG TORCH="{torch}"' in DOCKERFILE


def test_the_image_does_not_run_as_root() -> None:
    user = DOCKERFILE.index("\nUSER 10001\n")
    assert user < DOCKERFILE.index("\nCMD ")


def test_the_image_has_the_compiler_that_steps_are_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a container's steps run as they are, and only its log says so."""
    wanted: list[str] = []
    monkeypatch.setattr(compilation.shutil, "which", wanted.append)
    monkeypatch.delenv("CXX", raising=False)
    mllm = SimpleNamespace(
        device=torch.device("cpu"), source="x", ranks=SimpleNamespace(size=1), model=torch.nn.Linear(1, 1)
    )
    compilation.pays(cast(steering.MLLM, mllm))
    (compiler,) = wanted
    assert re.search(
        rf"apt-get install -y --no-install-recommends {re.escape(compiler)}(?= |$)", DOCKERFILE, re.MULTILINE
    )
