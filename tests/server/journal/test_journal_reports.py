"""A row keeps the numbers that readouts declare in their reports, and nothing that grows with the answer."""

from __future__ import annotations

import json
from typing import Any

import steering
from server.journal.bounded import MAX_JSON, bounded, changed, encoded
from server.journal.scalars import scalars
from server.journal.schema import DIAGNOSTICS
from steering.protocol import readout
from tests.server.journal.journals import NOTHING_SAID


def test_scalars_are_those_that_exist_and_are_finite() -> None:
    assert scalars(None, None) == scalars({}, {}) == NOTHING_SAID
    missing = {"focus": None, "decay": {"slope": None}, "residual": {"kl": [None]}}
    assert scalars({"steering": [{"dose": None}], "sage": None}, missing) == NOTHING_SAID
    applied = {"steering": [{"dose": 0.25}, {"dose": None}, {"dose": 0.75}]}
    envelope = {
        "focus": {"image": 2, "share": 0.5, "target_image": 1, "correct": False},
        "modality": {"attention_ratio": float("inf")},
        "decay": {"slope": -1},
        "residual": {"kl": [1.0, None, 3.0]},
        "flags": {"perceptual_blindness": True, "dissociation": None, "concentration": {"x": 1}},
    }
    assert scalars(applied, envelope) == NOTHING_SAID | {
        "attention_ratio": None, "focused_image": 2, "focus_share": 0.5, "target_image": 1, "correct": False,
        "decay_slope": -1.0, "kl": 2.0, "perceptual_blindness": True, "dissociation": None, "dose": 0.5,
    }  # fmt: skip


def test_every_column_of_a_number_is_one_that_something_fills() -> None:
    declared = {name for one in readout.REGISTRY.values() for name in one.scalars}
    assert set(DIAGNOSTICS) == (declared & set(DIAGNOSTICS)) | {"dose"}


def test_reports_are_bounded() -> None:
    assert bounded({"a": [1.0] * 100}) == {"a": {"count": 100, "mean": 1.0, "max": 1.0}}
    assert bounded(["x"] * 100) == {"count": 100, "first": ["x"] * 64}
    assert len(bounded({str(i): i for i in range(1000)})) == 64
    assert len(bounded("x" * 1000)) == 256
    deep: Any = 1
    for _ in range(50):
        deep = {"in": deep}
    assert len(json.dumps(bounded(deep))) < 100
    wide = {str(i): {str(j): "x" * 256 for j in range(64)} for i in range(64)}
    assert len(encoded(wide)) < MAX_JSON
    assert "omitted" in json.loads(encoded(wide))
    assert json.loads(encoded({"big": 2**70, "nan": float("nan"), "object": object()})) == {
        "big": 2.0**70, "nan": None, "object": "object",
    }  # fmt: skip


def test_what_grows_with_an_answer_is_brief() -> None:
    see = {"reading": "scale", "alpha": [0.25, 0.75], "alpha_max": [], "share_before": None}
    assert steering.See().brief(see) == {
        "reading": "scale",
        "alpha": {"count": 2, "mean": 0.5, "max": 0.75},
        "alpha_max": {"count": 0, "mean": None, "max": None},
        "share_before": None,
    }
    generate = {"masked": [[1, 2], []], "rebuilt": [{"token": 3, "masked": [[1], []]}], "changed": 1}
    assert steering.Generate().brief(generate) == {"masked": [2, 0], "rebuilt": 1, "changed": 1}


def test_a_change_is_made_where_something_stands_and_to_a_copy() -> None:
    tree = {"a": {"b": [1, 2], "c": 3}, "d": None, "e": True}
    assert changed(tree, ("a", "b"), len) == {"a": {"b": 2, "c": 3}, "d": None, "e": True}
    assert tree["a"] == {"b": [1, 2], "c": 3}
    for nowhere in (("a", "z"), ("d", "b"), ("e", "b"), ("z",)):
        assert changed(tree, nowhere, len) == tree
