"""Clients that ask one request after the other, and what each of them saw."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import aiohttp
import numpy as np

TIMEOUT = 600.0
"""Seconds that one answer may take."""


@dataclass(frozen=True)
class Server:
    """url: up to /v1. fields: what each of its requests has besides, taken in turn."""

    name: str
    url: str
    model: str
    fields: Sequence[Mapping[str, Any]] = ({},)


@dataclass
class Seen:
    """One request. status: of HTTP, 0 where there was none. first: seconds to the first text; gaps: between its pieces, of
    a stream; total: to the end. left: the client went before that."""

    status: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    left: bool = False


@dataclass(frozen=True)
class Load:
    """Requests as JSON, how many clients ask them, and the share of streams that is left after the first text. rate: how
    many come a second, in place of clients: each when it comes (a Poisson process), whatever became of those before it.
    again: seconds after which who was refused (429) asks the same again, instead of the next one."""

    bodies: Sequence[Mapping[str, Any]]
    clients: int
    leaving: float = 0.0
    rate: float | None = None
    again: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of a load, and how many seconds it took."""

    seen: Sequence[Seen]
    seconds: float

    @property
    def whole(self) -> list[Seen]:
        """The requests that were answered to the end."""
        return [one for one in self.seen if one.status == 200 and not one.left]

    @property
    def tokens_per_second(self) -> float:
        return sum(one.tokens for one in self.whole) / self.seconds

    def statuses(self) -> dict[str, int]:
        """How many requests ended how: their status, or that the client left."""
        found = ["left" if one.left else str(one.status) for one in self.seen]
        return {name: found.count(name) for name in sorted(set(found))}

    def times(self, name: str, percent: float) -> float | None:
        """A percentile in milliseconds of `first`, `total` or `gaps`; None where there are none."""
        values = [value for one in self.whole for value in _listed(getattr(one, name))]
        return float(np.percentile(values, percent)) * 1000 if values else None


def _listed(value: Any) -> Iterable[float]:
    return () if value is None else value if isinstance(value, list) else (value,)


def send(server: Server, load: Load, key: str | None = None) -> Outcome:
    """Have so many clients share the requests, each asking the next one when it has its answer; or by rate."""
    collecting = gc.isenabled()
    gc.disable()  # it would stop all clients at once, for up to a tenth of a second where there are many
    try:
        with ThreadPoolExecutor(1) as own:  # a caller may have a loop of its own
            return own.submit(asyncio.run, _send(server, load, key)).result()
    finally:
        if collecting:
            gc.enable()


async def _send(server: Server, load: Load, key: str | None) -> Outcome:
    leaving = random.Random(0)
    left = iter([leaving.random() < load.leaving for _ in load.bodies])
    bodies = iter([{**body, **server.fields[number % len(server.fields)]} for number, body in enumerate(load.bodies)])
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    found: list[Seen] = []
    timeout, connector = aiohttp.ClientTimeout(TIMEOUT), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            if load.rate is None:
                for _ in range(load.clients):
                    clients.create_task(_client(session, server, bodies, left, load.again, found))
            else:
                arrivals = random.Random(0)
                for due in accumulate(arrivals.expovariate(load.rate) for _ in load.bodies):
                    await asyncio.sleep(started + due - time.perf_counter())
                    clients.create_task(_client(session, server, islice(bodies, 1), left, load.again, found))
        return Outcome(found, time.perf_counter() - started)


async def _client(
    session: aiohttp.ClientSession,
    server: Server,
    bodies: Iterator[dict[str, Any]],
    left: Iterator[bool],
    again: float | None,
    found: list[Seen],
) -> None:
    for body in bodies:
        leaves = next(left)
        while True:
            seen, started = Seen(), time.perf_counter()
            try:
                await _ask(session, f"{server.url}/chat/completions", {"model": server.model, **body}, seen, leaves)
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                seen.status = 0
            seen.total = time.perf_counter() - started
            found.append(seen)
            if again is None or seen.status != 429:
                break
            await asyncio.sleep(again)


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Seen, leaves: bool) -> None:
    started = time.perf_counter()
    async with session.post(url, json=body) as answer:
        seen.status = answer.status
        if answer.status != 200 or not body.get("stream"):
            said = await answer.read()
            if answer.status == 200:
                seen.tokens = json.loads(said)["usage"]["completion_tokens"]
            return
        last = 0.0
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if "error" in event:
                seen.status = 500
                return
            if event.get("usage"):
                seen.tokens = event["usage"]["completion_tokens"]
            if not any(choice["delta"].get("content") for choice in event["choices"]):
                continue
            if seen.first is None:
                seen.first = now - started
                if leaves:
                    seen.left = True
                    answer.close()
                    return
            else:
                seen.gaps.append(now - last)
            last = now
