"""The embedded model in processes of their own that differ in how OpenMP's threads wait; see `benchmarks.run`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from server.startup.openmp import VARIABLES, set_wait_policy

ROOT = Path(__file__).parent.parent
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


def default() -> dict[str, str]:
    """Return an environment in which OpenMP spins as it does by itself, on all cores."""
    return {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "OMP_NUM_THREADS")}


def project() -> dict[str, str]:
    """Return the environment that `helmsight` answers in."""
    environ = default()
    set_wait_policy(environ)
    return environ


class Answering:
    """A process that answers prompts of the embedded model in an environment, at most `slots` at once."""

    def __init__(self, environ: dict[str, str], slots: int):
        command = [sys.executable, "-m", "benchmarks.waiting", str(slots)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, seeds: Sequence[int]) -> float:
        """Answer one prompt a seed; return the CPU seconds that it took."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(list(seeds)), file=process.stdin, flush=True)
        return float(process.stdout.readline())

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # closes its input, which ends it


@contextlib.contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run `loops` programs that do nothing but compute within the block."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def main(slots: int) -> None:
    """Answer each line of seeds on standard input with the CPU seconds that it took."""
    from benchmarks import models, sides  # noqa: PLC0415 -- torch, which only this process loads

    workload = models.demo()
    engine = sides.engine(workload, slots)
    for line in sys.stdin:
        started = time.process_time()
        sides.run_engine(engine, workload, json.loads(line))
        print(time.process_time() - started, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
