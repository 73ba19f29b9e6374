"""Grammars are refused in words that say what to change, and texts like special tokens are not."""

from __future__ import annotations

import json
from functools import reduce
from typing import Any

import pytest
import torch

import steering
from steering import Grammar, RequestError
from steering.grammar.compiled import Grammars
from steering.grammar.masks import Masks
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


SPECIAL = "a <|im_end|> b"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.choice([SPECIAL, "c"]), SPECIAL),
        (Grammar.regex(r"a <\|im_end\|> b"), SPECIAL),
        (Grammar.json_schema({"const": SPECIAL}), json.dumps(SPECIAL)),
        (Grammar.one_of("call", 'call: "c"', Grammar.choice([SPECIAL])), SPECIAL),
    ],
)
def test_texts_like_special_tokens_are_written_with_plain_ones(grammars: Grammars, grammar: Grammar, text: str) -> None:
    """A client's data may hold what a template writes; the token itself would be no text."""
    mllm = steering.load(checkpoint(), device="cpu")
    vocabulary, special = mllm.vocab_size, set(mllm.special_ids.tolist())
    matcher, masks, written = grammars.start(grammar), Masks(vocabulary, torch.device("cpu")), ""
    while written != text:
        possible = set(masks.possible([matcher])[0].nonzero().flatten().tolist()) - special
        written, token = max(
            (written + mllm.tokenizer.decode([token]), token)
            for token in possible
            if text.startswith(written + mllm.tokenizer.decode([token]))
        )
        matcher.advance(token)
    assert matcher.inner.is_accepting()


def test_the_one_of_two_that_is_wrong_is_named(grammars: Grammars) -> None:
    right, wrong = Grammar.choice(["a"], param="choice"), Grammar.json_schema({"not": {}}, param="schema")
    with pytest.raises(RequestError, match=r"^'schema' .*\"strict\": false it is left aside\.$") as caught:
        grammars.start(Grammar.one_of("call", 'call: "b"', wrong, param="tools"))
    assert caught.value.param == "schema"
    with pytest.raises(RequestError, match=r"^'tools' cannot be enforced") as caught:
        grammars.start(Grammar.one_of("call", "call: /(?=b)/", right, param="tools"))
    assert caught.value.param == "tools"


def test_both_of_two_that_are_followed_together_are_named(grammars: Grammars) -> None:
    """The matcher is brought into the state in which a bound of the library leaves it."""
    grammar = Grammar.one_of("call", 'call: "b"', Grammar.choice(["a"], param="choice"), param="tools")
    matcher = grammars.start(grammar).copy()
    assert not matcher.inner.consume_token(next(iter(steering.load(checkpoint(), device="cpu").stop_ids)))
    with pytest.raises(RequestError, match=r"^'tools' or 'choice' became too complex while it was followed") as caught:
        matcher.advance(0)
    assert caught.value.param == "tools"
