"""Sends a load to a server from a process of its own."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context

from benchmarks.load.client import Load, Outcome, Server


def send(server: Server, load: Load, key: str | None = None) -> Outcome:
    """Let clients share the requests, each sending the next one when it has its answer; or send them by rate."""
    return _start_process().submit(_carry, server, load, key).result()


@cache
def _start_process() -> ProcessPoolExecutor:
    """Start a process for locust's users, because gevent patches the process that imports it."""
    return ProcessPoolExecutor(1, get_context("spawn"))


def _carry(server: Server, load: Load, key: str | None) -> Outcome:
    from benchmarks.load.users import carry  # noqa: PLC0415

    return carry(server, load, key)
