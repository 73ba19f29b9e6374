"""The processes that compile, so that the one that serves need not: `steering.compiled.compiling` starts the first and tells
it what to make by a line of JSON, and they end with whoever started it."""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch._inductor import sizevars

from steering.compiled.building import build, build_loops
from steering.compiled.examples import example_step, manifest
from steering.compiled.packing import PackedWeights
from steering.compiled.step import Variant, constants
from steering.compiled.store import Store
from steering.model.loading import load
from steering.model.mllm import MLLM

OBJECTS = 100_000
"""Made until Python looks for cycles among them: tracing makes many that stay."""


class Making(NamedTuple):
    """What steps are made of, and where. said: where each is reported that is there."""

    store: Store
    mllm: MLLM
    weights: PackedWeights
    threads: int
    said: TextIO

    def work(self, steps: list[dict[str, Any]], begun: Synchronized[int], parent: int) -> None:
        """Make those that no other process has begun; writes a line for each: its number, and what went wrong."""
        _end_with(parent)
        gc.freeze()
        gc.set_threshold(OBJECTS)
        while True:
            with begun.get_lock():
                number, begun.value = begun.value, begun.value + 1
            if number >= len(steps):
                return
            fault = None
            try:
                self.make(steps[number])
            except Exception as error:
                traceback.print_exc()
                fault = f"{type(error).__name__}: {error}".splitlines()[0][:400]
            print(json.dumps([number, fault]), file=self.said, flush=True)  # in one piece, as it is short

    def make(self, wanted: dict[str, Any]) -> None:
        """Make one, if none has been made meanwhile."""
        with self.store.turn(wanted["key"]), self.store.room() as room:
            if self.store.find(wanted["key"]) is None:
                asked = Variant(*wanted["variant"]), wanted["axes"], self.weights
                step, _ = example_step(self.mllm, *asked)
                _fill(constants(step), wanted["small"])
                if [step.shape.text(), manifest(step)] != [wanted["shape"], wanted["manifest"]]:
                    raise RuntimeError("the model, or its hooks, are others than those that are served")
                self.store.keep(wanted["key"], *build(self.mllm, *asked, self.threads, room))


def main() -> int:
    """Make what the line asks for, in as many processes as it says."""
    said = os.fdopen(os.dup(1), "w")  # what libraries print is not for our parent
    os.dup2(2, 1)
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    parent = os.dup(0)  # the standard one is closed in a fork
    # torch asks the same of every layer, and remembers few answers: without this a step takes up to three times as long.
    sizevars.sympy.simplify = functools.cache(sizevars.sympy.simplify)  # type: ignore[attr-defined]
    store, steps = Store(Path(job["folder"])), job["steps"]
    mllm = load(**job["source"], device="cpu", unread=job["fingerprint"])
    mllm.settle(compiled=True)
    build_loops(job["threads"], Path(tempfile.gettempdir()))
    making = Making(store, mllm, PackedWeights(mllm, job["dtypes"]), job["threads"], said)
    context = multiprocessing.get_context("fork")  # it has no threads; they share its weights and modules
    begun = context.Value("i", 0)
    workers = [context.Process(target=making.work, args=(steps, begun, parent)) for _ in range(job["processes"])]
    for one in workers:
        one.start()
    said.close()
    _end_with(parent)
    for one in workers:
        one.join()
    ended = [one.exitcode for one in workers if one.exitcode]
    if ended:
        print(f"a process that compiled ended with {ended[0]}", file=sys.stderr)
    return len(ended)


def _fill(tensors: dict[str, torch.Tensor], values: dict[str, list[float]]) -> None:
    for name, numbers in values.items():
        tensors[name].data.copy_(torch.tensor(numbers, dtype=tensors[name].dtype).view_as(tensors[name]))


def _end_with(parent: int) -> None:
    """Have this process, and all that was started beside it, end once the other end of a pipe is closed."""

    def watch() -> None:
        while os.read(parent, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
