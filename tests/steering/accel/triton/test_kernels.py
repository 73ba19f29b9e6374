"""Triton's kernels beside plain torch: on a GPU, or interpreted on a CPU by a triton that is installed for that."""

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


@pytest.mark.long
def test_kernels_equal_torch(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[4])]
    if find_spec("triton") is None:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), TRITON]
        subprocess.run(install, check=True)
        paths.append(str(tmp_path))
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    environ = os.environ | interpreted | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.steering.accel.triton.kernel_checks"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1:] == [f"alike {'cuda' if torch.cuda.is_available() else 'cpu'}"], ran.stderr[
        -3000:
    ]
