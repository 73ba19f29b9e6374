"""The child processes that compile steps outside of the serving process.

`steering.cpu.compiling` starts the first and sends it a line of JSON that says what to make; all of them end with
their parent.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch._inductor import sizevars

from steering.cpu.building import TracedStep, build, build_loops, quote_library_folders, trace
from steering.cpu.examples import example_step, manifest
from steering.cpu.packages.store import Store, StoredStep
from steering.cpu.packing import PackedWeights
from steering.cpu.step import Variant, constants
from steering.model.loading import load
from steering.model.mllm import MLLM

OBJECTS = 100_000
"""Allocations until Python's garbage collector runs: tracing creates many objects that stay."""


class Making(NamedTuple):
    """The inputs and the destination of compiled steps. said: the stream on which each finished step is reported."""

    store: Store
    mllm: MLLM
    weights: PackedWeights
    threads: int
    said: TextIO

    def work(self, steps: list[dict[str, Any]], numbers: int) -> None:
        """Make the steps whose numbers are in a pipe, a byte each, until it is empty.

        Writes a line for each step: its number, and its error.
        """
        threading.Thread(target=_end_with_parent, daemon=True).start()
        gc.freeze()
        gc.set_threshold(OBJECTS)
        while byte := os.read(numbers, 1):
            (number,), fault = byte, None
            try:
                self.make(steps[number])
            except Exception as error:
                traceback.print_exc()
                fault = _describe_error(error)
            print(json.dumps([number, fault]), file=self.said, flush=True)  # a short line is written in one piece

    def make(self, job: dict[str, Any]) -> None:
        """Make a step, unless it, or the same graph by other code, has been made meanwhile."""
        with self.store.turn(job["key"]):
            if self.store.find(job["key"]) is not None:
                return
            example = Variant(*job["variant"]), job["axes"], self.weights
            step, _ = example_step(self.mllm, *example)
            _fill(constants(step), job["small"])
            if [step.shape.text(), manifest(step)] != [job["shape"], job["manifest"]]:
                raise RuntimeError("the model or its hooks differ from those of the server")
            traced = trace(self.mllm, *example, self.threads)
            with self.store.turn(traced.key):
                entry = self.store.find(traced.key) or self.build(traced)
            self.store.share(job["key"], entry, traced.about)

    def build(self, traced: TracedStep) -> StoredStep:
        """Compile a traced step with our own kernels, which the first one builds."""
        kernels = Path(tempfile.gettempdir())
        with self.store.turn(f"kernels in {kernels}"):
            build_loops(self.threads, kernels)
        with tempfile.TemporaryDirectory() as room:
            return self.store.keep(traced.key, build(traced, self.threads, Path(room)), {})


def main() -> int:
    """Make what the line asks for, in as many processes as it says."""
    output = os.fdopen(os.dup(1), "w")  # libraries' output must not reach the parent
    os.dup2(2, 1)
    torch.set_num_threads(1)  # whatever the environment says: a fork lacks the other threads, and would hang
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    # torch simplifies the same terms for every layer, with a small cache: without this a step takes up to three times as
    # long.
    sizevars.sympy.simplify = functools.cache(sizevars.sympy.simplify)  # type: ignore[attr-defined]
    quote_library_folders()
    try:
        mllm = load(**job["source"], device="cpu", unread=job["fingerprint"])
        mllm.settle(compiled=True)
        making = Making(Store(Path(job["folder"])), mllm, PackedWeights(mllm, job["dtypes"]), job["threads"], output)
        _end_if_alone()
    except Exception as error:
        traceback.print_exc()
        print(_describe_error(error), file=sys.stderr)
        return 1
    steps = job["steps"]
    numbers, filled = os.pipe()
    os.write(filled, bytes(range(len(steps))))
    os.close(filled)
    if job["processes"] == 1:
        making.work(steps, numbers)
        return 0
    context = multiprocessing.get_context("fork")  # they share weights and modules
    workers = [context.Process(target=making.work, args=(steps, numbers)) for _ in range(job["processes"])]
    for worker in workers:
        worker.start()
    output.close()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for worker in workers:
        worker.join()
    ended = [worker.exitcode for worker in workers if worker.exitcode]
    if ended:
        print(f"a compiling process exited with status {ended[0]}", file=sys.stderr)
    return len(ended)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]


def _fill(tensors: dict[str, torch.Tensor], values: dict[str, list[float]]) -> None:
    for name, numbers in values.items():
        tensors[name].data.copy_(torch.tensor(numbers, dtype=tensors[name].dtype).view_as(tensors[name]))


def _end_with_parent() -> None:
    """End, with all child processes, once the other end of our input is closed."""
    while os.read(0, 4096):  # not by sys.stdin, whose lock would block our exit
        pass
    os.killpg(0, signal.SIGKILL)


def _end_if_alone() -> None:
    """End where the parent has gone, without a thread that waits, because a fork would lose it."""
    if select.select([0], [], [], 0)[0]:
        _end_with_parent()
