"""What compiled code depends on."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from pathlib import Path

import torch
import transformers

FORMAT = 5
CODE = ("accel", "decoder", "interventions", "measures.py", "model", "recorders", "tower")
"""Of this package, what a step's computations are written in."""
SOURCES = (".py", ".cpp", ".h")


@functools.cache
def surroundings() -> dict[str, str]:
    """What compiled code depends on beside the model: versions, this project's code, the processor."""
    root = Path(__file__).parents[2]
    code = hashlib.sha256()
    for path in sorted(
        path for one in CODE for path in (root / one, *(root / one).rglob("*")) if path.suffix in SOURCES
    ):
        code.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return {
        "format": str(FORMAT),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "python": sys.version,
        "code": code.hexdigest(),
        "processor": f"{platform.machine()} {_features()}",
    }


def _features() -> str:
    """What the processor is able to, which code is compiled for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = ("flags", "Features", "model name", "vendor_id", "cpu family", "model", "stepping")
    told = {line.split(":")[0].strip(): line for line in reversed(lines) if line.split(":")[0].strip() in names}
    return " ".join(told[name] for name in sorted(told))
