"""Runs beside each other, in a few processes that keep their model."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

T = TypeVar("T")

MOST = 4
"""The default limit of processes, each of which has a model in memory."""

_run: Callable[[str], Any] | None = None
_stopped = False


def processors() -> int:
    """Return the number of processors on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def beside(groups: Sequence[Sequence[str]], run: Callable[[str], T], jobs: int) -> Iterator[tuple[str, T]]:
    """Yield the result of `run` for each name as it ends: groups follow one another, the names of a group run in parallel.

    The processes are forked, so that `run` may be any function, and all of them before anything is computed here, after
    which that would not be safe. It never is on macOS, where, as for a single job, everything runs in this process. The
    processes end with this one, however it ends; on Ctrl-C running work is interrupted and nothing else starts. Raises what
    `run` raises.
    """
    global _run  # noqa: PLW0603 -- what is forked is found in memory, and need not be pickled
    if jobs < 2 or sys.platform != "linux":
        yield from ((name, run(name)) for group in groups for name in group)
        return
    _run = run
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin, (jobs, os.getpid()))
    try:
        for group in groups:
            waiting = {pool.submit(_call, name): name for name in group}
            for future in as_completed(waiting):
                yield waiting[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        _run = None


def _begin(jobs: int, parent: int) -> None:
    """Prepare a process for its runs."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGINT, _stop)  # with Python's own handler an idle process would print a traceback
    import torch  # noqa: PLC0415 -- only now: a process that has computed with it should not be forked

    torch.set_num_threads(max(1, min(torch.get_num_threads(), processors() // jobs)))


def _end_with(parent: int) -> None:
    """Exit when the parent is gone; orphans would continue, and hold the folders that the next run needs."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _stop(*_: object) -> None:
    global _stopped  # noqa: PLW0603 -- a process is stopped once
    _stopped = True


def _call(name: str) -> Any:
    global _stopped  # noqa: PLW0603
    assert _run is not None
    if _stopped:  # it was queued before Ctrl-C
        raise KeyboardInterrupt
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _run(name)
    except KeyboardInterrupt:
        _stopped = True
        raise
    finally:
        signal.signal(signal.SIGINT, _stop)
