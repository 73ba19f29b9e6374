"""Background compilation of steps: by other processes, at low priority, into the folder where they stay."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import torch

from steering.cpu.packages.package import Package
from steering.cpu.packages.store import Store, default_folder
from steering.cpu.steps import CompiledSteps, WantedStep
from steering.model.mllm import MLLM

log = logging.getLogger(__name__)

PROCESSES = 4
"""Maximum number of compiling processes: with more, the last would wait for the longest step."""
LEAVING = 10.0
"""Maximum seconds that a stopping engine waits for compilation to clean up."""
State = Literal["compiling", "ready", "failed"]
_CHILD = "import os, sys; os.nice(19); from steering.cpu.child import main; sys.exit(main())"
Check = Callable[[WantedStep, Package], None]
"""A check that raises where a package's step differs from the plain one; called from any thread."""


class Compiling:
    """Brings the wanted steps into use: those in the folder at once, the others once they are compiled.

    folder: where they are kept (None: the user's cache). Where it cannot be used safely, they are kept until the end of the
    process.
    """

    def __init__(
        self,
        mllm: MLLM,
        steps: CompiledSteps,
        requested: Sequence[WantedStep],
        check: Check,
        threads: int,
        folder: str | None,
    ):
        self._mllm, self._steps, self._check, self._threads = mllm, steps, check, threads
        forks = sys.platform == "linux"  # elsewhere a process that has computed cannot fork
        self._processes = min(PROCESSES, torch.get_num_threads()) if forks else 1
        self._process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._own_folder: str | None = None
        self._store = self._open_store(folder)
        self._begun = time.monotonic()
        self.state: State = "compiling"
        missing = [step for step in requested if not self._load_stored(step)]
        if not missing:
            self._end("ready")
        elif mllm.source is None:
            self._end("failed", "it was not loaded from a checkpoint")
        else:
            log.info("compiling steps in the background; they run eagerly until that is done")
            self._thread = threading.Thread(
                target=self._compile, args=(missing,), name="helmsight-compiling", daemon=True
            )
            self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all steps are in use; return False where they are not, or not by then."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "compiling", timeout)
            return self.state == "ready"

    def stop(self) -> None:
        """Stop compiling."""
        with self._changed:
            self._stopped = True
            process = self._process
        if process is not None:
            _kill(process)
            self._thread.join(LEAVING)  # it removes unfinished files
        self._leave()

    def _open_store(self, folder: str | None) -> Store:
        if folder != "off":
            try:
                return Store(default_folder() if folder is None else Path(folder))
            except OSError as error:
                log.warning("compiled steps are not kept for the next start: %s", error)
        self._own_folder = tempfile.mkdtemp(prefix="helmsight-compiled-")
        return Store(Path(self._own_folder))

    def _leave(self) -> None:
        """Remove the folder that belongs to this process alone; what was loaded from it is in memory."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _load_stored(self, step: WantedStep) -> bool:
        """Return True where a step is in the folder, after taking it into use."""
        entry = self._store.find(step.key)
        if entry is None:
            return False
        try:
            package = self._steps.load(step, entry)
            self._check(step, package)
        except Exception as error:
            log.warning("a compiled step is unusable and will be compiled again: %s", error)
            self._store.drop(step.key)
            if "of" in entry.about:  # the entry under whose key it was found
                self._store.drop(entry.about["of"])
            return False
        self._steps.add(step, package)
        return True

    def _compile(self, missing: list[WantedStep]) -> None:
        try:
            fault = self._compile_missing(missing)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        self._end("ready" if fault is None else "failed", fault)

    def _compile_missing(self, missing: list[WantedStep]) -> str | None:
        """Compile steps, and use them as they come; return the first error."""
        source = self._mllm.source
        assert source is not None
        job = {
            "folder": str(self._store.folder),
            "source": source._asdict(),
            "fingerprint": self._mllm.fingerprint,
            "threads": self._threads,
            "processes": min(self._processes, len(missing)),
            "dtypes": self._steps.weights.dtypes,
            "steps": [
                {
                    "key": step.key,
                    "variant": [*step.variant],
                    "axes": step.axes,
                    "shape": step.shape.text(),
                    "manifest": step.manifest,
                    "small": step.small,
                }
                for step in missing
            ],
        }
        with self._store.room() as room, without_spaces(room) as place, tempfile.TemporaryFile("w+") as errors:
            with self._changed:
                if self._stopped:
                    return "the engine was stopped"
                self._process = process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _CHILD],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=_environment(place),
                    process_group=0,  # with its compilers, which end with it
                )
            with process:  # only this thread closes the pipe that it reads: another may kill the process meanwhile
                try:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(json.dumps(job) + "\n")
                    process.stdin.flush()
                    pending, faults = dict(enumerate(missing)), []
                    for line in process.stdout:
                        number, fault = json.loads(line)
                        if self._load_stored(step := pending.pop(number)):
                            details = " ".join(step.variant), len(self._steps), time.monotonic() - self._begun
                            log.info("a compiled step is in use (%s): %d, after %.1f s", *details)
                        else:
                            faults.append(fault or "the compiled step cannot be used")
                            if len(faults) == 1:
                                log.warning("a step cannot be compiled (%s): %s", " ".join(step.variant), faults[0])
                    process.wait()
                    if faults:
                        return str(faults[0])
                    if pending:
                        errors.seek(0)
                        return (errors.read().strip().splitlines() or [f"it exited with status {process.returncode}"])[
                            -1
                        ]
                finally:
                    _kill(process)
        return None

    def _end(self, state: State, reason: str | None = None) -> None:
        if self._stopped:
            log.debug("compiling stopped with the engine: %s", reason)
        elif state == "ready":
            log.info("steps are compiled, after %.1f s", time.monotonic() - self._begun)
        else:
            log.warning("compiled only %d steps; the rest run eagerly: %s", len(self._steps), reason)
        self._leave()
        with self._changed:
            self.state = state
            self._changed.notify_all()


@contextmanager
def without_spaces(folder: Path) -> Iterator[Path]:
    """Yield a path of a folder that has no spaces: torch does not quote the files that it has compilers write."""
    if shlex.quote(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="helmsight-") as place:
        link = Path(place) / "room"
        link.symlink_to(folder.absolute(), target_is_directory=True)
        yield link


def _environment(room: Path) -> dict[str, str]:
    """Return the child's environment: torch's cache is in a folder of ours, and never in one of others."""
    root = str(Path(__file__).parents[2])
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TORCHINDUCTOR_CACHE_DIR": str(room),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": str(room),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:  # its children may be alive even if it has ended
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
