"""Measures the effect on other clients of slow requests, sent a byte at a time: `python -m benchmarks.drip`.

On one server of the embedded model it measures how long `/health` and short chats take alone, and beside `--connections`
clients that send their heads and bodies one byte a second and never finish; a client that is cut off (408) reconnects.
Server, slow connections and measured client are a process each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.load.run import shape
from benchmarks.load.serving import serving
from benchmarks.load.workloads import WORKLOADS
from server.engine.resources import raise_file_limit

BETWEEN = 1.0
"""Seconds between two bytes of a connection."""
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
BODY = b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{"messages": ['
Times = dict[str, list[float]]


class Drips:
    """Connections that never finish a request, in a process of their own.

    Every second one is in its head, the others in their bodies. `open` are connected now, `refused` were cut off with an
    answer, `lost` without one.
    """

    def __init__(self, port: int, count: int):
        spawning = multiprocessing.get_context("spawn")
        self._counts = spawning.Array("i", 3)
        self._process = spawning.Process(target=_drip, args=(port, count, self._counts), daemon=True)
        self._process.start()

    @property
    def open(self) -> int:
        return int(self._counts[0])

    @property
    def refused(self) -> int:
        return int(self._counts[1])

    @property
    def lost(self) -> int:
        return int(self._counts[2])

    def close(self) -> None:
        self._process.terminate()
        self._process.join()


def _drip(port: int, count: int, counts: Any) -> None:
    async def connect(number: int) -> None:
        await asyncio.sleep(number / count)  # spread over a second
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            counts[0] += 1
            writer.write(BODY if number % 2 else HEAD)
            reading = asyncio.create_task(reader.read(64))
            while not (await asyncio.wait({reading}, timeout=BETWEEN))[0]:
                writer.write(b" ")
            counts[0] -= 1
            counts[1 if b" 408 " in reading.result() else 2] += 1
            writer.close()

    async def drip() -> None:
        await asyncio.gather(*(connect(number) for number in range(count)))

    raise_file_limit()
    asyncio.run(drip())


def ask(port: int, seconds: float, tokens: int) -> Times:
    """Measure the seconds that `/health` and a short chat take, in turns, each over a new connection, for `seconds`."""
    times_by_kind: Times = {"health": [], "first": [], "chat": []}
    end, seed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        started = time.perf_counter()
        with _answer(port, "GET", "/health") as answer:
            answer.read()
        times_by_kind["health"].append(time.perf_counter() - started)
        body = {"messages": WORKLOADS["short"](seed), **shape(tokens, True)}
        started, first = time.perf_counter(), None
        with _answer(port, "POST", "/v1/chat/completions", body) as answer:
            for line in answer:
                if first is None and line.startswith(b"data: {") and _says(line):
                    first = time.perf_counter() - started
        times_by_kind["first"].append(first or np.nan)
        times_by_kind["chat"].append(time.perf_counter() - started)
        seed += 1
    return times_by_kind


@contextlib.contextmanager
def _answer(port: int, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(
            method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
        )
        with connection.getresponse() as answer:
            assert answer.status == 200
            yield answer


def _says(line: bytes) -> bool:
    return any(choice["delta"].get("content") for choice in json.loads(line[6:])["choices"])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drip", description=__doc__, allow_abbrev=False)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="duration of each measurement, without and with slow connections"
    )
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each chat's answer")
    parser.add_argument("flags", nargs="*", help="more flags of helmsight serve, after --")
    options = parser.parse_args(argv)
    with serving(*options.flags) as server:
        port = server.port
        ask(port, min(2.0, options.seconds), options.tokens)
        alone = ask(port, options.seconds, options.tokens)
        drips = Drips(port, options.connections)
        while drips.open < options.connections:
            time.sleep(0.1)
        beside = ask(port, options.seconds, options.tokens)
        still, refused, lost = drips.open, drips.refused, drips.lost
        drips.close()
    columns = ("", "beside", "p50 (ms)", "p99 (ms)", "max (ms)", "asked")
    print(f"| {' | '.join(columns)} |\n|---|---|{'---:|' * 4}")
    for name, label in (("health", "`/health`"), ("first", "first token of a chat"), ("chat", "the whole chat")):
        for load, measured in (("nothing", alone), (f"{options.connections} that drip", beside)):
            times = measured[name]
            milliseconds = [f"{value * 1e3:.1f}" for value in (*np.percentile(times, (50, 99)), max(times))]
            print(f"| {' | '.join((label, load, *milliseconds, str(len(times))))} |")
    ended = f"{refused} were cut off with an answer, {lost} without one"
    print(f"\n{still} of them were open at the end, until then {ended}; load {os.getloadavg()[0]:.1f}.")
    return int(max(beside["health"]) > 10.0)


if __name__ == "__main__":
    sys.exit(main())
