"""A `vllm serve` that this server starts, starts again where it ends, and stops."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from server.settings import Settings

log = logging.getLogger("helmsight")

TRIES = 3
"""Starts in a row of a process that ends before it was ready, after which it is not started again."""
PAUSE = 5.0
"""Seconds between an end and the next start."""
LAST = 15.0
"""Seconds for vLLM to end after SIGTERM, before it is killed."""
_GUARDIAN = """
import ctypes, os, signal, subprocess, sys
parent, last, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(parent):
        sys.exit(1)
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
try:
    child = subprocess.Popen(command)
    status = child.wait()
except SystemExit:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child.terminate()
        child.wait(float(last))
    finally:
        os.killpg(0, signal.SIGKILL)
sys.exit(status if status >= 0 else 128 - status)
"""
"""A program that runs a command in its own process group, and ends all of it when the process that started it ends.

vLLM's engine would outlive it, above all while it loads.
"""


class LaunchedServer:
    """A process that is kept running. `failed` is called where it ends `TRIES` times in a row before `ready` was."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], failed: Callable[[], object] = lambda: None
    ):
        self._command, self._environment, self._failed = list(command), dict(environment), failed
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._starts = 0
        self.given_up = False
        # Linux ends the process with the thread that started it, so that thread has to stay.
        self._thread = threading.Thread(target=self._keep, name="helmsight-vllm-serve", daemon=True)

    def start(self) -> None:
        """Start the process, and keep it running from now on."""
        self._thread.start()

    def ready(self) -> None:
        """Note that it works: the starts in a row are counted anew."""
        self._starts = 0

    def stop(self) -> None:
        """End the process; returns when it has ended."""
        self._stopping.set()
        process = self._process
        if process is not None:
            _end(process)
        if self._thread.is_alive():
            self._thread.join(LAST)

    def _keep(self) -> None:
        while not self._stopping.is_set():
            if self._starts >= TRIES:
                log.critical("vllm serve has ended %d times in a row before it was ready", TRIES)
                self.given_up = True
                self._failed()
                return
            if self._process is not None:
                log.info("vllm serve is started again")
            self._starts += 1
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", _GUARDIAN, str(os.getpid()), str(LAST), *self._command], env=self._environment,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            if self._stopping.is_set():
                _end(self._process)
            status = self._process.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(
                    self._process.pid, signal.SIGKILL
                )  # an engine outlives a server that is killed, with its memory
            if not self._stopping.is_set():
                log.error("vllm serve has ended with the status %d", status)
                self._stopping.wait(PAUSE)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it started, which are its process group."""
    for number, seconds in ((signal.SIGTERM, LAST), (signal.SIGKILL, 1.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        break


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port: int = trial.getsockname()[1]
        return port


def executable(settings: Settings) -> Path:
    """Return the interpreter of the environment of `--vllm-env`."""
    return Path(settings.vllm_env or sys.prefix).expanduser() / "bin" / "python"


def command_of(settings: Settings, model: str, port: int) -> list[str]:
    """Return the command that serves a model with vLLM and the plugin at a port of this machine."""
    length = [] if settings.max_length is None else ["--max-model-len", str(settings.max_length)]
    return [
        str(executable(settings)), "-m", "vllm.entrypoints.cli.main", "serve", model,
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "helmsight",
        "--dtype", settings.dtype, "--max-num-seqs", str(settings.slots),
        "--limit-mm-per-prompt", f'{{"image": {max(1, settings.max_images)}, "video": 0}}',
        *length, "--disable-uvicorn-access-log", *shlex.split(settings.vllm_args),
    ]  # fmt: skip
