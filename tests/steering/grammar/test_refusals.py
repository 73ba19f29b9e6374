"""Schemas are refused in words that say what to change."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

import steering
from steering import Grammar, RequestError
from steering.grammar.compiled import Grammars
from tests.server.fakes import checkpoint


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(steering.load(checkpoint(), device="cpu"))


def nested(levels: int) -> dict[str, Any]:
    return reduce(lambda items, _: {"type": "array", "items": items}, range(levels), dict[str, Any]())


@pytest.mark.parametrize(
    ("refused", "accepted", "said"),
    [
        ({"minimum": 2**63}, {"minimum": 10**15}, "one up to 1e15"),
        ({"minimum": 1e300}, {"minimum": 1e15}, "one up to 1e15"),
        ({"multipleOf": 0}, {"multipleOf": 1}, "multipleOf must be above 0"),
        (nested(150), nested(100), "100 levels are well"),
        ({"pattern": "a^b"}, {"pattern": "^ab$"}, r"\^ and \$ may stand at its ends alone"),
        ({"pattern": r"\bb"}, {"pattern": "b"}, r"\\b and look-around nowhere"),
    ],
)
def test_they_name_what_is_accepted_instead(
    grammars: Grammars, refused: dict[str, Any], accepted: dict[str, Any], said: str
) -> None:
    grammars.start(Grammar.json_schema(accepted))
    with pytest.raises(RequestError, match=f"^'schema' cannot be enforced: .*{said}"):
        grammars.start(Grammar.json_schema(refused, param="schema"))
