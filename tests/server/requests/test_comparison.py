"""Drift between two answers by id."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from flask.testing import FlaskClient

from server.errors import BadRequest
from server.requests import comparison
from server.requests.comparison import AnswerStates
from steering import Choice, drift
from tests.server.api.choices import QUESTION
from tests.server.conftest import ask, data_uri


def choice(states: torch.Tensor | None, index: int = 0) -> Choice:
    measured = {} if states is None else {"residual": SimpleNamespace(states=states)}
    return Choice(index, "", (), "stop", measured=measured)


def test_answers_are_compared_by_id(client: FlaskClient) -> None:
    first = ask(client, data_uri(), QUESTION, diagnostics={"include": ["drift"]}).json
    assert first["choices"][0]["diagnostics"]["drift"] is None
    wanted = {"compare_to": first["id"]}
    same = ask(client, data_uri(), QUESTION, diagnostics=wanted).json
    drift = same["choices"][0]["diagnostics"]["drift"]
    assert (drift["to"], drift["cosine"]) == (first["id"], pytest.approx([1.0] * 8, abs=1e-3))
    assert "focus" in same["choices"][0]["diagnostics"]
    other = ask(client, QUESTION, diagnostics=wanted, stream=True)
    events = [json.loads(line[6:]) for line in other.text.splitlines() if line.startswith("data: {")]
    (told,) = [e["choices"][0]["diagnostics"]["drift"] for e in events if e["choices"][0].get("diagnostics")]
    assert told["to"] == first["id"]
    assert min(told["cosine"]) < 0.99


def test_an_answer_that_is_not_remembered_is_refused(client: FlaskClient) -> None:
    plain = ask(client, data_uri(), QUESTION).json
    response = ask(client, data_uri(), QUESTION, diagnostics={"compare_to": plain["id"]})
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "diagnostics.compare_to", "answer_not_found")


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "KEPT", 2)
    states = AnswerStates()
    for name in "abc":
        states.keep(name, choice(torch.stack([torch.eye(2), torch.eye(2)])))
    states.keep("d", choice(None))
    states.keep("e", choice(torch.eye(2), index=1))
    for name in "bc":
        other = torch.tensor([[[0.0, 2.0], [2.0, 0.0]], [[2.0, 0.0], [0.0, 2.0]]])
        for rows, cosine in (("mean", [0.0, 0.0]), ("last", [1.0, 1.0])):
            earlier = states.find(name)
            assert (earlier.name, drift(other, earlier.states, rows)) == (name, cosine)
    for name in "ade":
        with pytest.raises(BadRequest):
            states.find(name)
