"""Schemas drawn at random: an answer that comes to its end is valid, and what is refused is refused by name."""

from __future__ import annotations

import json
import random
from typing import Any

from jsonschema import Draft202012Validator

from steering import Grammar, Request, RequestError, Sampling
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import user

VALUES = [1, "a", 'b"c', None, True, 1.5, "\u00e9", [1, 2], {"x": 1}, "longer text"]
PATTERNS = ["^[a-c]{1,4}$", "^x", "y$", "^(ab|cd)*$", "[0-9]{3}", "^\\d+\\.\\d$"]
CLOSED = {"additionalProperties": False}
LEAVES = ("whole", "number", "text", "pattern", "one of", "kinds", "format")
NODES = (*LEAVES, "list", "tuple", "object", "any", "all", "reference")


def drawn(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Draw a schema of a few levels."""

    def below() -> dict[str, Any]:
        return drawn(rng, depth + 1)

    kind, n = rng.choice(NODES if depth < 3 else LEAVES), rng.randint(1, 3)
    if kind == "whole":
        return {"type": "integer", "minimum": -n, "maximum": 50 * n} | ({"multipleOf": n} if depth else {})
    if kind == "number":
        return {"type": "number", "exclusiveMinimum": -n / 4, "maximum": 90.5}
    if kind == "text":
        return {"type": "string", "minLength": n - 1, "maxLength": 5}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 8}
    if kind == "one of":
        return {"enum": rng.sample(VALUES, n)} if n > 1 else {"const": rng.choice(VALUES)}
    if kind == "kinds":
        return {"type": rng.sample(["string", "integer", "boolean", "null"], n), "maxLength": 4, "minimum": 0}
    if kind == "format":
        return {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4"])}
    if kind == "list":
        return {"type": "array", "items": below(), "minItems": n - 1, "maxItems": n}
    if kind == "tuple":
        return {"type": "array", "prefixItems": [below() for _ in range(n)], "items": False, "minItems": n - 1}
    if kind == "object":
        names = rng.sample(["a", "b", "c d", "\u00e9", 'e"f'], n)
        more = {} if rng.random() < 0.7 else CLOSED if depth else {"additionalProperties": {"type": "boolean"}}
        required = [name for name in names if rng.random() < 0.5]
        properties = {name: below() for name in names}
        return {"type": "object", "properties": properties, "required": required, **more}
    if kind in ("any", "all"):
        return {f"{kind}Of": [below() for _ in range(n)]}
    return {"$ref": "#/$defs/t"}


def shut(schema: Any) -> Any:
    """Return the schema for jsonschema: every object that does not mention further properties has none."""
    if isinstance(schema, list):
        return [shut(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: shut(value) for name, value in schema.items()}
    return {**CLOSED, **closed} if isinstance(closed.get("properties"), dict) else closed


def test_every_finished_answer_is_valid(make_engine: MakeEngine) -> None:
    rng = random.Random(0)
    engine = make_engine("qwen2_vl", slots=8)
    submitted, refused = [], []
    for seed in range(64):
        schema = drawn(rng) | {"$defs": {"t": {"enum": [1, "t"]}}}
        sampling = Sampling(max_tokens=90, temperature=1.2, seed=seed)
        try:
            submitted.append((schema, engine.submit(Request(user("?"), sampling, grammar=Grammar.json_schema(schema)))))
        except RequestError as error:
            refused.append(str(error))
    ended = [(schema, engine.result_of(completion).choices[0]) for schema, completion in submitted]
    closed = 0
    finished = [(schema, choice) for schema, choice in ended if choice.finish_reason == "stop"]
    assert len(finished) > 45
    assert len(refused) < 10
    assert all(message.startswith("'grammar' cannot be enforced: ") for message in refused)
    for schema, choice in finished:
        Draft202012Validator(schema).validate(json.loads(choice.text))
        if '"allOf"' not in json.dumps(schema):
            Draft202012Validator(shut(schema)).validate(json.loads(choice.text))
            closed += schema != shut(schema)
    assert closed >= 4
