"""Schemas whose multiples would make an automaton without end."""

from __future__ import annotations

from typing import Any

import pytest

from steering import Grammar, RequestError


@pytest.mark.parametrize(
    ("schema", "refused"),
    [
        ({"type": "number", "multipleOf": 2**31}, True),
        ({"type": "integer", "multipleOf": 1_000_003}, True),
        ({"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, True),
        ({"properties": {"a": {"items": {"multipleOf": 0.123456789}}}}, True),
        ({"type": "number", "multipleOf": 0.01}, False),
        ({"type": "integer", "multipleOf": 10**9}, False),
        ({"properties": {"a": {"multipleOf": 12}, "multipleOf": {"const": {"multipleOf": 2**31}}}}, False),
    ],
)
def test_multiples_that_make_too_large_an_automaton_are_refused_before_it_is_made(
    schema: dict[str, Any], refused: bool
) -> None:
    """The library compiled the first one with ever more memory, behind a request that had long been refused."""
    if refused:
        with pytest.raises(RequestError, match="'multipleOf'"):
            Grammar.json_schema(schema)
    else:
        Grammar.json_schema(schema)
