"""Triton's kernels beside plain torch, and compiled for GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

TRITON = "triton>=3.9"
"""The first one that interprets all kernels; unpacked it takes a gigabyte."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return where Python finds this package, and a triton that is installed for this where there is none."""
    found = [str(Path(__file__).parents[3])]
    if find_spec("triton") is None:
        folder = str(tmp_path_factory.mktemp("triton"))
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, TRITON]
        subprocess.run(install, check=True)
        found.append(folder)
    return os.pathsep.join(found)


def last_line(paths: str, program: str, *arguments: str, **environ: str) -> str:
    command = [sys.executable, "-m", f"tests.steering.triton.{program}", *arguments]
    environment = os.environ | environ | {"PYTHONPATH": paths}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout.splitlines()[-1]


@pytest.mark.long
def test_kernels_equal_torch(paths: str) -> None:
    """They run on a GPU, or are interpreted on a CPU."""
    has_gpu = torch.cuda.is_available()
    interpreted = {} if has_gpu else {"TRITON_INTERPRET": "1"}
    assert last_line(paths, "kernel_checks", **interpreted) == f"alike {'cuda' if has_gpu else 'cpu'}"


@pytest.mark.long
@pytest.mark.parametrize("capability", ["86", "90", "120"])
def test_kernels_compile_and_fit_into_a_gpu(paths: str, capability: str) -> None:
    """Of an RTX 3090, an H100 and an RTX 5090."""
    assert last_line(paths, "compiled_for", capability) == "compiled"
