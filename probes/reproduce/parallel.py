"""Runs beside each other, each in one of a few processes that keep their model."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 4
"""Processes unless more are asked for: each has a model in memory."""

_run: Callable[[str], Any] | None = None


def processors() -> int:
    """On how many processors this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def beside(groups: Sequence[Sequence[str]], run: Callable[[str], T], jobs: int) -> Iterator[tuple[str, T]]:
    """What `run` returns of each name, as they end: one group after the other, those of a group beside each other.

    The processes are forked, so that `run` may be anything, and all of them before anything is computed here, after which
    that would not be safe; nor is it on macOS, where, as for one job, all run here. Raises what `run` raises."""
    global _run  # noqa: PLW0603 -- what is forked is found in memory, and need not be pickled
    if jobs < 2 or sys.platform != "linux":
        yield from ((name, run(name)) for group in groups for name in group)
        return
    _run = run
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _share_processors, (jobs,))
    try:
        for group in groups:
            waiting = {pool.submit(_called, name): name for name in group}
            for one in as_completed(waiting):
                yield waiting[one], one.result()
    finally:
        pool.shutdown(cancel_futures=True)
        _run = None


def _share_processors(jobs: int) -> None:
    import torch  # noqa: PLC0415 -- only now: a process that has computed with it should not be forked

    torch.set_num_threads(max(1, min(torch.get_num_threads(), processors() // jobs)))


def _called(name: str) -> Any:
    assert _run is not None
    return _run(name)
