"""A slot is as neutral as a new one for whoever asks for nothing, whoever had it, and however a sequence came into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from steering import Request
from steering.protocol.slots import Slots
from tests.steering.conftest import MakeEngine
from tests.steering.core.faults.test_faults import FAMILY, KINDS, SAMPLING, answers, requests


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> list[Any]:
    """Return the answers of the two neighbours on engines of their own, and of the plain one with a longer request."""
    observed, _, plain = requests(make_engine(FAMILY), "plain")
    return [answers(make_engine(FAMILY, slots=6), [request])[0] for request in (observed, plain, longer_than(plain))]


def longer_than(plain: Request) -> Request:
    return replace(plain, sampling=replace(SAMPLING, max_tokens=14))


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_slot_keeps_nothing(kind: str, make_engine: MakeEngine, expected: list[Any]) -> None:
    observed, request, plain = requests(make_engine(FAMILY), kind)
    longer, engine = longer_than(plain), make_engine(FAMILY, slots=6)
    assert answers(engine, [request, longer])[1] == expected[2]  # which is moved to the other's slot on the way
    assert answers(engine, [plain, observed, plain]) == [expected[1], expected[0], expected[1]]


def test_an_unused_slot_is_not_written(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    for name in ("place", "move"):
        for kind in (kind_ for kind_ in _kinds(Slots) if name in vars(kind_)):
            real = vars(kind)[name]

            def noted(self: Any, *args: Any, real: Any = real) -> None:
                written.append(self.name)
                real(self, *args)

            monkeypatch.setattr(kind, name, noted)
    engine = make_engine(FAMILY, slots=6)
    observed, steered, plain = requests(engine, "steered")
    answers(engine, [plain, longer_than(plain)])
    assert not written
    answers(engine, [steered, observed])
    assert written


def _kinds(kind: type) -> list[type]:
    return [kind, *(subclass for child in kind.__subclasses__() for subclass in _kinds(child))]
