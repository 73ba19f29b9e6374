"""Servers as processes of their own, for tests of the whole."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, TextIO

import requests

from server import cli
from tests.ports import own_port
from tests.server.conftest import data_uri, user
from tests.waiting import PATIENCE, wait_for

ROOT = Path(__file__).parents[3]


def children(process: int) -> list[int]:
    """Return the processes that a process has forked; none where it has ended."""
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


COMMAND = [sys.executable, "-m", "server.cli"]
"""The command that runs `helmsight` in a process of its own."""


def _stream(number: int) -> TextIO:
    return open(number, "w", buffering=1, closefd=False)


class ForkedProcess:
    """A `helmsight` command in a fork of this process, with the interface of `subprocess.Popen`.

    Importing torch and transformers anew takes longer than most of what these tests do.
    """

    def __init__(self, words: list[str], environ: dict[str, str], log: Path):
        self.returncode: int | None = None
        log.touch()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(words, environ, log)

    def _run(self, words: list[str], environ: dict[str, str], log: Path) -> None:
        """Run the command as if in an interpreter of its own: without pytest's files, log handlers, filters and exits."""
        status = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(output, stream)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            sys.stdout, sys.stderr = _stream(1), _stream(2)
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(ROOT)
            sys.argv = [cli.__file__, *words]
            logging.getLogger().handlers.clear()
            for logger in logging.Logger.manager.loggerDict.values():
                for handler in getattr(
                    logger, "handlers", ()
                ):  # those of libraries, which write to what pytest gave them
                    if isinstance(handler, logging.StreamHandler):
                        handler.setStream(_stream(2))  # of its own, as some close it
            warnings.resetwarnings()
            warnings.simplefilter("ignore")
            atexit._clear()
            gc.freeze()
            status = cli.main(words)
        except SystemExit as ending:  # as that of a worker of gunicorn's, which is a fork of this one
            status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            os._exit(status)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(sys.argv, timeout or 0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """A server process on a free port.

    It is a fork if the command is `helmsight`, unless `anew` demands a new interpreter. environ: variables beside this
    process's own; those that are None are removed.
    """

    def __init__(self, command: list[str], log: Path, anew: bool = False, **environ: str | None):
        port = own_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.headers: dict[str, str] = {}
        variables: dict[str, str | None] = {**os.environ, "HELMSIGHT_PORT": str(port), **environ}
        env = {name: value for name, value in variables.items() if value is not None}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if command[: len(COMMAND)] == COMMAND and not anew:
            self.process = ForkedProcess(command[len(COMMAND) :], env, log)
            return
        with log.open("w") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)

    def get(self, route: str) -> requests.Response:
        return requests.get(self.url + route, headers=self.headers, timeout=PATIENCE)

    def post(self, **fields: Any) -> requests.Response:
        body = {"messages": [user(data_uri(), "Describe the picture.")], **fields}
        return requests.post(self.url + "/v1/chat/completions", json=body, timeout=PATIENCE)

    def stats(self, name: str) -> float:
        (line,) = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + " ")]
        return float(line.split()[1])

    def wait_until_ready(self, seconds: float = 180) -> Server:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.get("/ready").ok
            except (requests.ConnectionError, requests.Timeout):  # on a busy machine its first answer takes long
                return False

        try:
            wait_for(ready, seconds=seconds)
        except AssertionError:
            self.end()
            raise
        return self

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
