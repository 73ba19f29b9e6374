"""The switch with which modules whose forward passes were replaced run their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OWN: ContextVar[bool] = ContextVar("own forward passes", default=False)


@contextmanager
def own_forwards() -> Iterator[None]:
    """Let replaced modules run their own forward pass in this thread."""
    token = _OWN.set(True)
    try:
        yield
    finally:
        _OWN.reset(token)


def runs_own() -> bool:
    """Return True where replaced modules run their own forward pass."""
    return _OWN.get()
