"""A process of a test's own that need not import anything again."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from multiprocessing.process import BaseProcess
from pathlib import Path


@contextmanager
def forked(run: Callable[[], object], said: Path) -> Iterator[BaseProcess]:
    """Start a process that runs only `run`, leads a process group of its own, and prints into a file.

    It is killed if it has not ended. Forking is safe here, as the tests compute with one thread.
    """

    def alone() -> None:
        os.setsid()
        with said.open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
            with redirect_stdout(file), redirect_stderr(file):  # pytest's own are not the streams of these numbers
                run()

    process = multiprocessing.get_context("fork").Process(target=alone)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
