"""Coroutines in a loop of their own: a browser's tests leave theirs running in the main thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def ran(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread and return its result."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()
