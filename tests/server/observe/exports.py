"""Answers as engines export them, made from live ones: without readouts, which another engine does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from server.batches.file import row
from server.batches.transport import LocalTransport
from tests.server.conftest import data_uri, user

READOUTS = ("focus", "modality", "decay", "residual", "confidence", "tam")

KINDS: dict[str, dict[str, Any]] = {
    "an image": {"messages": [user(data_uri(), "What colour is it?")]},
    "a contradicting text": {"messages": [user(data_uri(), "Text context: It is blue.\nWhat colour is it?")]},
    "two images": {"messages": [user(data_uri(), data_uri(), "Compare them.")], "max_tokens": 12},
    "a text alone": {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 10},
    "a system message": {
        "messages": [{"role": "system", "content": "Be brief."}, user(data_uri(), "What colour is it?")],
    },
    "an answer that was cut": {"messages": [user(data_uri(), "What colour is it?")], "max_tokens": 3},
    "several sampled answers": {
        "messages": [user(data_uri(), "What is there?")], "temperature": 1.2, "seed": 7, "n": 3, "max_tokens": 12,
    },
    "penalties and bias": {
        "messages": [user(data_uri(), "What is there?")], "repetition_penalty": 1.3, "logit_bias": {"7": 2},
        "response_format": {"type": "text"}, "top_p": 0.9, "temperature": 0.7, "seed": 1,
    },
}  # fmt: skip
"""Requests of all kinds by name."""


def live(transport: LocalTransport, **more: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the bodies of all kinds, and this engine's own responses to them with all readouts."""
    bodies = {name: {"temperature": 0, "max_tokens": 24, **fields} for name, fields in KINDS.items()}
    asked = {"diagnostics": {"include": list(READOUTS)}, "logprobs": True, **more}
    return bodies, {name: responded(transport, {**body, **asked}) for name, body in bodies.items()}


def responded(transport: LocalTransport, body: Mapping[str, Any]) -> dict[str, Any]:
    answered = transport.send(body)
    assert answered.ok, answered.reason
    found: dict[str, Any] = answered.body
    return found


def exported(name: str, response: Mapping[str, Any], *, logprobs: bool = False) -> dict[str, Any]:
    """Return a row as `vllm run-batch` writes it, with OpenAI's keys alone."""
    kept = ("index", "message", "finish_reason", *(("logprobs",) if logprobs else ()))
    choices = [{key: choice[key] for key in kept} for choice in response["choices"]]
    plain = {key: response[key] for key in ("id", "object", "created", "model", "usage")}
    from server.batches.file import BatchResponse

    return row(f"vllm-{name}", name, BatchResponse(200, {**plain, "choices": choices}, "vllm-batch-1"))


def same(ours: Any, theirs: Any, place: str = "", within: float = 1e-6) -> int:
    """Check that two trees are equal, their numbers `within` that (those above 1: of themselves); return their count."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), place
        return sum(same(ours[key], theirs[key], f"{place}.{key}", within) for key in theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs), place
        return sum(
            same(one, other, f"{place}[{i}]", within) for i, (one, other) in enumerate(zip(ours, theirs, strict=True))
        )
    if isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=within, abs=within), place
        return 1
    assert ours == theirs, place
    return 0
