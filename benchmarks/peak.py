"""Answers one prompt in a process of its own and prints its peak resident memory in MB; see `benchmarks.run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from benchmarks import sides
from benchmarks.models import Workload


def main(mode: str, threads: int, workload: Workload) -> None:
    """Answer a prompt; `mode` is off, on (focus and modality), sage, generate or eager (with `output_attentions`)."""
    torch.set_num_threads(threads)
    if mode in ("off", "on", "sage"):
        diagnose = sides.FOCUS if mode == "on" else None
        stages = sides.SAGES["SAGE"] if mode == "sage" else None
        sides.run_engine(sides.engine(workload, slots=2), workload, [0], diagnose=diagnose, sage=stages)
    else:
        eager = mode == "eager"
        sides.Plain(workload, "eager" if eager else "sdpa").run([0], output_attentions=eager)
    print(peak_kilobytes() / 1024)


def peak_kilobytes() -> int:
    """Return the greatest resident memory of this program.

    It is not ru_maxrss, which a child inherits from its parent.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmHWM: peak memory is measured on Linux only")


if __name__ == "__main__":
    fields = json.loads(sys.argv[3])
    fields |= {"folder": Path(fields["folder"]), "size": tuple(fields["size"])}
    main(sys.argv[1], int(sys.argv[2]), Workload(**fields))
