"""What the worker process has to answer with: processors, threads, and open files."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

SWITCH = 0.0005
"""Seconds for which a thread keeps the interpreter where another one wants it."""
MOST_FILES = 65_536
"""Open files that the process asks for."""


class Pump:
    """One thread that does, in order, what it is told; none of it may wait."""

    def __init__(self, name: str):
        self._due: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run(self, act: Callable[[], object]) -> None:
        """Have it act soon; any thread may call it."""
        self._due.put(act)

    def _run(self) -> None:
        while True:
            self._due.get()()


class RequestThreads:
    """A pool that knows how many requests, and how many bytes of them, wait for one of its threads."""

    def __init__(self, count: int, name: str):
        self.queued = self.queued_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count, name)

    def submit(self, size: int, act: Callable[[], object]) -> None:
        """Have a thread act; `size` bytes are held until it begins."""
        self._count(1, size)
        self._pool.submit(self._run, size, act)

    def end(self) -> None:
        """Drop what waits; what runs goes on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, size: int, act: Callable[[], object]) -> None:
        self._count(-1, -size)
        act()

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.queued += requests
            self.queued_bytes += size


def share_interpreter() -> None:
    """Let the engine's thread have the interpreter soon after it asks, which it does at each operation: by default it waits
    for 5 ms where another thread computes, longer than a step of a small model takes."""
    sys.setswitchinterval(SWITCH)


def keep_what_is_loaded() -> None:
    """Have the garbage collector leave alone what a process has once its model is loaded, which stays to the end: looking
    through all of it takes a third of a second, in which no thread does anything."""
    gc.collect()
    gc.freeze()


def raise_file_limit() -> int:
    """Allow this process as many open files as it may have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def processors() -> int:
    """How many processors' time this process may use, which in a container are fewer than the machine has."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def prepared_at_once() -> int:
    """How many requests are prepared at the same time: each takes a processor, and memory for its pictures."""
    return max(2, processors())


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """How many processors' time the control group of this process may use, as in a container or a unit of systemd: the least
    of its own bound and of those of the groups that it lies in; None for no bound. own: the file that says which it is; one
    that does not lie below `root`, as in a container that is shown its own group alone, is that of `root`."""
    quotas = [quota for folder in _groups(root, own) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _groups(root: Path, own: Path) -> set[Path]:
    """The folders of the group of this process and of all it lies in, of both versions of control groups."""
    found = {root, root / "cpu"}
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." not in below.parts:  # a group beside the root of its namespace, which shows none of it
            found |= {top / one for one in (below, *below.parents)}
    return found


def _quota(folder: Path) -> float | None:
    """The bound of one group; None where it has none, or none that can be read."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None
