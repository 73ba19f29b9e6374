"""The engine's process: the worker forks it before it has threads, and it ends with the worker."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from server.engine import local
from server.engine.progress import Tell
from server.engine.resources import keep_what_is_loaded, share_interpreter
from server.settings import Settings
from steering.child import host
from steering.child.client import ChildClient, wait_for
from steering.child.clock import StepClock
from steering.child.link import Link

log = logging.getLogger("helmsight")

_SET_PARENT_DEATH_SIGNAL = 1


class EngineProcess:
    """A forked process in which the model is loaded and served, after `wait` seconds.

    Linux signals it when its parent ends; elsewhere it notices that the link is closed.
    """

    def __init__(self, settings: Settings, wait: float = 0.0):
        self._settings = settings
        self._clock = StepClock()
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                ours.close()
                _detach(parent, theirs)
                time.sleep(wait)
                status = _serve(settings, Link(theirs, shares=False), self._clock)
            except BaseException:
                log.exception("the engine's process failed")
            finally:
                logging.shutdown()
                sys.stderr.flush()
                os._exit(status)
        theirs.close()
        self._link = Link(ours)

    def load(self, settings: Settings, tell: Tell) -> local.LocalEngine:
        """Return the engine in the process once it is loaded, as `server.engine.local.load` returns one in this process."""
        torch.set_num_threads(1)  # each request has its own thread; computing is left to the engine's process
        with ThreadPoolExecutor(1, "helmsight-reader") as aside:
            loading = aside.submit(local.load_without_weights, settings)
            facts, stats = wait_for(self._link, tell, self._ended)
            longest = local.longest_step(settings)
            client = ChildClient(loading.result(), facts, self._link, self._clock, stats, longest, self._ended)
        return local.LocalEngine(client, facts.magnitudes, local.calibration_files(client.mllm, settings))

    def _ended(self) -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        local.end_process()


def _detach(parent: int, link: socket.socket) -> None:
    """Detach from the worker: close its sockets and ignore its signals, but die with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGCHLD, signal.SIGABRT, signal.SIGWINCH):
        signal.signal(number, signal.SIG_DFL)
    for file in Path("/proc/self/fd").glob("*") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):
            if os.readlink(file).startswith("socket:") and int(file.name) > 2 and int(file.name) != link.fileno():
                os.close(int(file.name))  # a listener left open here would accept clients that nobody answers


def _serve(settings: Settings, link: Link, clock: StepClock) -> int:
    share_interpreter()
    torch.set_num_threads(torch.get_num_threads())  # after a fork torch makes its pool anew, which two threads cannot

    def died() -> None:
        """End both processes, so that both are replaced."""
        logging.shutdown()
        os._exit(1)

    engine = host.load(link, lambda tell: local.make_engine(settings, tell, died))
    if engine is None:
        return 1
    keep_what_is_loaded()
    served = host.Host(link, engine, clock, alone=lambda: os._exit(0))
    stepping = threading.Thread(target=served.run, name="helmsight-engine")
    stepping.start()
    stepping.join()
    threading.Event().wait()  # the process ends once the worker has received everything and is gone
    return 0
