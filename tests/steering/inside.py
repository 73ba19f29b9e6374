"""A view into engines of this process: the sequences of a completion, which callers do not see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from steering.front.client import Client
from steering.front.completion import Completion
from steering.front.engine import Engine
from steering.protocol.sequence import Sequence

_SEQUENCES: WeakKeyDictionary[Completion, list[Sequence]] = WeakKeyDictionary()


def sequences(completion: Completion) -> list[Sequence]:
    """Return the sequences of a completion: its answers, then its baselines."""
    return _SEQUENCES[completion]


@contextmanager
def noting_sequences() -> Iterator[None]:
    """Note the sequences of every completion of an engine in this process."""
    added = threading.local()
    add, enqueue = Engine._add, Client._enqueue

    def noted_add(self: Engine, request: Any) -> Any:
        added.sequences = add(self, request)
        return added.sequences

    def noted_enqueue(self: Client, *args: Any, **options: Any) -> Completion:
        completion = enqueue(self, *args, **options)
        if isinstance(self, Engine):
            _SEQUENCES[completion] = added.sequences
        return completion

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_add", noted_add)
        patch.setattr(Client, "_enqueue", noted_enqueue)
        yield
