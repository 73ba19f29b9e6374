"""Locust's users, which send requests and record them.

gevent patches the process that imports this; `send` has a separate one for it.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import gevent
from gevent.event import Event
from locust import FastHttpUser, task
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS
from locust.env import Environment
from locust.exception import StopUser

from benchmarks.load.client import TIMEOUT, Load, Outcome, Seen, Server
from benchmarks.load.protocols import PROTOCOLS, Protocol

FIRST, BETWEEN = "first token", "between tokens"
"""Names in locust's statistics, beside POST, of the times to the first text of a stream and between its pieces."""


class Client(FastHttpUser):
    """A user who asks for chats; its host is a server's URL up to /v1."""

    abstract = True
    protocol = PROTOCOLS["chat"]
    connection_timeout = network_timeout = TIMEOUT

    def on_start(self) -> None:
        self.client.client.valid_response_codes = range(600)  # a refusal is an answer too, no exception to record

    def ask(self, body: Mapping[str, Any], leaves: bool = False, headers: Mapping[str, str] | None = None) -> Seen:
        """Send a request, and leave after the first text of a stream if `leaves`.

        Locust is told the time to the end. Times to the first text and between pieces are reported for complete answers, and
        only at their end, so that reporting takes no time between two pieces.
        """
        record, started, path = Seen(), time.perf_counter(), self.protocol.path
        request_headers = {"Accept-Encoding": "identity", **(headers or {})}
        with self.client.post(
            path, json=body, headers=request_headers, stream=True, catch_response=True, context={"seen": record}
        ) as answer:
            try:
                _read(answer, bool(body.get("stream")), record, started, leaves, self.protocol)
            except FAILURE_EXCEPTIONS as broken:
                record.status, record.fault = 0, repr(broken)
                answer.failure(broken)
            record.total = time.perf_counter() - started
            if record.status == 0:
                record.fault = record.fault or str(answer.error)
            elif record.status != 200:
                answer.failure(f"status {record.status}")
            answer.request_meta["response_time"] = record.total * 1000
        if record.status == 200 and not record.left and record.first is not None:
            for kind, seconds in ((FIRST, record.first), *((BETWEEN, gap) for gap in record.gaps)):
                self.environment.events.request.fire(
                    request_type=kind, name=path, response_time=seconds * 1000, response_length=0, exception=None, context={}
                )  # fmt: skip
        return record


def _read(answer: Any, stream: bool, record: Seen, started: float, leaves: bool, protocol: Protocol) -> None:
    record.status = answer.status_code
    if record.status != 200 or not stream:
        content = answer.content
        if record.status == 200:
            record.tokens = _tokens(protocol, json.loads(content))
        return
    last = 0.0
    while line := answer.stream.readline(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        now, event = time.perf_counter(), json.loads(line[6:])
        if "error" in event or event.get("type") == "response.failed":
            record.status = 500
            answer.release()
            return
        record.tokens = _tokens(protocol, event) or record.tokens
        if not protocol.has_text(event):
            continue
        if record.first is None:
            record.first = now - started
            if leaves:
                record.left = True
                answer.release()  # closes the connection of an unfinished answer
                return
        else:
            record.gaps.append(now - last)
        last = now


def _tokens(protocol: Protocol, event: Mapping[str, Any]) -> int:
    return int((protocol.usage(event) or {}).get(protocol.tokens, 0))


def carry(server: Server, load: Load, key: str | None) -> Outcome:
    """Send a load with users of this process."""
    leaving = random.Random(0)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    protocol = PROTOCOLS[server.protocol]
    bodies = [
        {"model": server.model, **protocol.body(dict(body)), **server.fields[number % len(server.fields)]}
        for number, body in enumerate(load.bodies)
    ]
    todo = iter([(body, leaving.random() < load.leaving) for body in bodies])
    start = Event()

    class Asking(Client):
        host = server.url
        protocol = PROTOCOLS[server.protocol]
        concurrency = 1 if load.rate is None else len(load.bodies)

        @task
        def go(self) -> None:
            start.wait()
            if load.rate is None:
                for body, leaves in todo:
                    self.until_taken(body, leaves)
            else:
                spawned = [gevent.spawn(self.until_taken, *next(todo)) for _ in _arrivals(load.rate, len(load.bodies))]
                gevent.joinall(spawned, raise_error=True)
            raise StopUser

        def until_taken(self, body: Mapping[str, Any], leaves: bool) -> None:
            while self.ask(body, leaves, headers).status == 429 and load.again is not None:
                gevent.sleep(load.again)

    gc.collect()
    gc.disable()  # a collection would stop all clients, for up to a tenth of a second with many of them
    try:
        return _run(Asking, load.clients if load.rate is None else 1, start)
    finally:
        gc.enable()


def _arrivals(rate: float, count: int) -> Iterator[None]:
    """Yield `count` times at the moments of a Poisson process of `rate` a second."""
    draw, started = random.Random(0), time.perf_counter()
    for due in accumulate(draw.expovariate(rate) for _ in range(count)):
        gevent.sleep(max(0.0, started + due - time.perf_counter()))
        yield


def _run(user_class: type[Client], users: int, start: Event) -> Outcome:
    """Spawn users, let them start together, and wait until all have stopped."""
    records: list[Seen] = []
    broken: list[Exception] = []
    environment = Environment(user_classes=[user_class], catch_exceptions=False)
    runner = environment.create_local_runner()

    @environment.events.request.add_listener
    def _(context: Mapping[str, Any], **_: Any) -> None:
        if "seen" in context:
            records.append(context["seen"])

    @environment.events.user_error.add_listener
    def _(exception: Exception, **_: Any) -> None:
        broken.append(exception)
        runner.user_greenlets.kill(block=False)

    runner.start(users, spawn_rate=min(users, 100))
    runner.spawning_greenlet.join()
    started = time.perf_counter()
    start.set()
    runner.user_greenlets.join()
    seconds = time.perf_counter() - started
    runner.quit()
    if broken:
        raise broken[0]
    return Outcome(records, seconds)
