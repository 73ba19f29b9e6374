"""Resources of the worker process: processors, threads and open files."""

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
"""Seconds for which a thread keeps the interpreter while another thread wants it."""
MOST_FILES = 65_536
"""Number of open files that the process asks for."""


class Pump:
    """A thread that runs callables in order; none of them may block."""

    def __init__(self, name: str):
        self._due: SimpleQueue[Callable[[], object]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def run(self, act: Callable[[], object]) -> None:
        """Queue a callable; any thread may call this."""
        self._due.put(act)

    def _run(self) -> None:
        while True:
            self._due.get()()


class RequestThreads:
    """A thread pool that counts its queued requests and their bytes."""

    def __init__(self, count: int, name: str):
        self.queued = self.queued_bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count, name)

    def submit(self, size: int, act: Callable[[], object]) -> None:
        """Run `act` in a thread of the pool; `size` bytes count as queued until it begins."""
        self._count(1, size)
        self._pool.submit(self._run, size, act)

    def end(self) -> None:
        """Drop queued work; running work continues."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, size: int, act: Callable[[], object]) -> None:
        self._count(-1, -size)
        act()

    def _count(self, requests: int, size: int) -> None:
        with self._lock:
            self.queued += requests
            self.queued_bytes += size


def share_interpreter() -> None:
    """Shorten the interpreter's switch interval, so that the engine's thread gets it soon after each operation.

    By default a thread waits for 5 ms while another one computes, which is longer than a step of a small model.
    """
    sys.setswitchinterval(SWITCH)


def keep_what_is_loaded() -> None:
    """Exclude everything that exists once the model is loaded from garbage collection.

    These objects stay to the end, and scanning them takes a third of a second in which no thread runs.
    """
    gc.collect()
    gc.freeze()


def raise_file_limit() -> int:
    """Raise the limit of open files as far as allowed and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def processors() -> int:
    """Return how many processors this process may use; in a container these are fewer than the machine has."""
    cores, quota = len(os.sched_getaffinity(0)), cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def prepared_at_once() -> int:
    """Return how many requests may be prepared at once: each takes a processor, and memory for its images."""
    return max(2, processors())


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the processors that the control group of this process may use, None if unbounded.

    A container or a systemd unit sets such a bound. The result is the least bound of the group and its ancestors. `own` is
    the file that names the group; a group that is not below `root`, as in a container that sees its own group only, counts
    as `root`.
    """
    quotas = [quota for folder in _groups(root, own) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _groups(root: Path, own: Path) -> set[Path]:
    """Return the folders of this process's control group and its ancestors, for both cgroup versions."""
    folders = {root, root / "cpu"}
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        number, _, remainder = line.partition(":")
        controllers, _, path = remainder.partition(":")
        if number == "0" and not controllers:
            top = root
        elif "cpu" in controllers.split(","):
            top = root / "cpu"
        else:
            continue
        below = Path(path.lstrip("/"))
        if ".." not in below.parts:  # such a group is outside its namespace's root and not visible here
            folders |= {top / folder for folder in (below, *below.parents)}
    return folders


def _quota(folder: Path) -> float | None:
    """Return the bound of one group, None if it has none or cannot be read."""
    for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((folder / name).read_text() for name in files).split()
            return None if quota in ("max", "-1") else int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None
