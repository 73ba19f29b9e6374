"""Measures how soon a server answers again after its worker or engine process is killed: `python -m benchmarks.restart`.

It serves the embedded model, without a journal. After `kill -9`, a chat of one token is requested until it is answered.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence

import requests

from benchmarks.load.serving import children, serving

PATIENCE = 120.0
CHAT = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}


def main(argv: Sequence[str] | None = None) -> int:
    """Kill each process several times, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restart", description=__doc__, allow_abbrev=False)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    times_by_stop: dict[str, list[float]] = {"worker": [], "engine": []}
    with serving() as server:
        _until_answered(server.url)
        for _ in range(options.repeats):
            for name, times in times_by_stop.items():
                (worker,) = children(server.pid)
                (engine,) = children(worker)
                os.kill(worker if name == "worker" else engine, signal.SIGKILL)
                killed = time.monotonic()
                _until_answered(server.url)
                times.append(time.monotonic() - killed)
    print("| killed | answers again after (s): median | shortest | longest |\n|---|---:|---:|---:|")
    for name, times in times_by_stop.items():
        print(f"| {name} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")
    return 0


def _until_answered(url: str) -> None:
    """Send requests until there is an answer; raise TimeoutError where there is none for long."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(requests.RequestException):
            if requests.post(f"{url}/v1/chat/completions", json=CHAT, timeout=PATIENCE).ok:
                return
        time.sleep(0.02)
    raise TimeoutError(f"{url} does not answer.")


if __name__ == "__main__":
    sys.exit(main())
