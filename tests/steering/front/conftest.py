"""An engine that runs, and what the plain model says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from steering import Engine
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.front.asking import begun, conversations
from tests.steering.plain import Answer

PlainAnswer = Callable[[str, int, int], Answer]
LONGEST = 7


@pytest.fixture
def running(make_engine: MakeEngine) -> Iterator[Engine]:
    engine = make_engine("qwen2_vl", slots=3, max_waiting=64)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def plain_answer(load_plain: LoadPlain) -> PlainAnswer:
    """Return a function (family, number, steps) -> the plain model's answer to that conversation.

    An answer has at most `LONGEST` tokens. Each is computed once, and shorter ones are its beginnings.
    """
    whole = functools.cache(lambda family, number: load_plain(family).answer(conversations(family)[number], LONGEST))

    def answer(family: str, number: int, steps: int) -> Answer:
        return begun(whole(family, number), steps)

    return answer
