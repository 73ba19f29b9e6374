"""The process that compiles, so that the one that serves need not: `steering.compiled.compiling` starts it and tells it what
to make by a line of JSON, and it ends with whoever started it."""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._inductor import sizevars

from steering.compiled.building import build, build_loops
from steering.compiled.examples import example_step, manifest
from steering.compiled.packing import PackedWeights
from steering.compiled.step import Variant, constants
from steering.compiled.store import Store
from steering.model.loading import load


def main() -> int:
    """Make what the line asks for; writes a line for each entry that is there: its number, and what went wrong."""
    said = os.fdopen(os.dup(1), "w")  # what libraries print is not for our parent
    os.dup2(2, 1)
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # torch asks the same of every layer, and remembers few answers: without this a step takes up to three times as long.
    sizevars.sympy.simplify = functools.cache(sizevars.sympy.simplify)  # type: ignore[attr-defined]
    store = Store(Path(job["folder"]))
    mllm = load(**job["source"], device="cpu", unread=job["fingerprint"])
    mllm.settle(compiled=True)
    loops, weights = functools.cache(build_loops), PackedWeights(mllm, job["dtypes"])
    for number, one in enumerate(job["steps"]):
        fault = None
        try:
            with store.turn(one["key"]), store.room() as room:
                if store.find(one["key"]) is None:
                    asked = Variant(*one["variant"]), one["axes"], weights
                    step, _ = example_step(mllm, *asked)
                    _fill(constants(step), one["small"])
                    if [step.shape.text(), manifest(step)] != [one["shape"], one["manifest"]]:
                        raise RuntimeError("the model, or its hooks, are others than those that are served")
                    loops(job["threads"], Path(tempfile.gettempdir()))
                    store.keep(one["key"], *build(mllm, *asked, job["threads"], room))
        except Exception as error:
            traceback.print_exc()
            fault = f"{type(error).__name__}: {error}".splitlines()[0][:400]
        print(json.dumps([number, fault]), file=said, flush=True)
    said.close()
    return 0


def _fill(tensors: dict[str, torch.Tensor], values: dict[str, list[float]]) -> None:
    for name, numbers in values.items():
        tensors[name].data.copy_(torch.tensor(numbers, dtype=tensors[name].dtype).view_as(tensors[name]))


def _end_with_parent() -> None:
    """End, with all that was started here, once the other end of our input is closed."""
    while os.read(0, 4096):  # not of sys.stdin, whose lock our end would wait for
        pass
    os.killpg(0, signal.SIGKILL)
