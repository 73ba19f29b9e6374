"""Stock `vllm serve` with the plugin, in its own environment and a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import requests

from server.engine.launched import free_port

ROOT = Path(__file__).resolve().parents[3]
START = 900.0
"""Seconds within which a server must be ready; compiling takes minutes on a busy machine."""

LAYERS = {"eager": ("--enforce-eager",), "compiled": ()}
"""Flags by how the layers run."""


def environment_folder() -> Path:
    """Return the folder of the environment with vLLM; `make test-vllm` builds it and names it."""
    folder = Path(os.environ.get("HELMSIGHT_VLLM_ENV", ROOT / ".vllm")).absolute()
    assert (folder / "bin" / "python").exists(), f"{folder} has no vLLM: run `make test-vllm`."
    return folder


class Address(str):
    """The address of a server, which runs in a process group of its own."""

    __slots__ = ("killed", "process")

    process: subprocess.Popen[bytes]
    killed: bool

    def kill(self) -> None:
        """End the server without notice, as a lost machine ends it."""
        self.killed = True
        os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def served(model: Path, work: Path, *flags: str, **settings: str) -> Iterator[Address]:
    """Serve a model with `vllm serve` and yield its address; `settings` are environment variables.

    `work` keeps the compile cache and the log, of which an AssertionError shows the end where the server does not start.
    """
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", work / f"vllm-{port}.log"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    environment |= {
        "VLLM_PLUGINS": "helmsight", "HELMSIGHT_VECTORS": str(model / "vectors"), "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(work / "cache"), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", **settings,
    }  # fmt: skip
    command = [
        str(environment_folder() / "bin" / "python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "helmsight", "--dtype", "float32",
        "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", "32",
        "--limit-mm-per-prompt", '{"image": 4, "video": 0}', *flags,
    ]  # fmt: skip
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, env=environment, cwd=work, stdout=written, stderr=written, start_new_session=True
        )
    address = Address(url)
    address.process, address.killed = process, False
    try:
        _wait(url, process, log)
        yield address
        assert address.killed or process.poll() is None, _tail(log)
    finally:
        _end(process)


def counters(url: str) -> dict[str, float]:
    """Return the sums of vLLM's own counters and gauges by name, over their labels."""
    values: dict[str, float] = {}
    for line in requests.get(f"{url}/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    return values


def steps_of(url: str) -> dict[str, int]:
    """Return the plugin's counts of steps."""
    steps: dict[str, int] = requests.get(f"{url}/v1/helmsight/steps", timeout=30).json()
    return steps


@contextmanager
def steered_steps(url: str, mode: str) -> Iterator[None]:
    """Assert that steps with an addition run within, and that layers run as Python only in a mode that is not compiled.

    The plugin counts both.
    """
    before = steps_of(url)
    yield
    after = steps_of(url)
    assert after["steered"] - before["steered"] >= 4
    assert (after["eager_layers"] == before["eager_layers"]) == (mode == "compiled")


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        assert process.poll() is None, _tail(log)
        with suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise AssertionError(_tail(log))


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    with suppress(ProcessLookupError):  # workers that it left behind
        os.killpg(process.pid, signal.SIGKILL)
