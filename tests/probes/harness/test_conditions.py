"""The conditions of benchmarks: which are known, how they are chosen, where steering's vector comes from."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import steering
from probes.answering.base import Push
from probes.harness.comparison import BASELINE
from probes.harness.conditions import Wanted, chosen, known, pushes
from probes.harness.options import ModelOptions
from steering import RefusalPrompt, See, VectorError
from tests.probes.harness.toy import CONDITIONS


def session(found: Any) -> Any:
    """Return a session with a server that has that vector, or raises that error."""

    def vector(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    return SimpleNamespace(endpoint=SimpleNamespace(vector=vector, check_interventions=lambda: None))


def test_patterns_choose_and_keep_the_order() -> None:
    assert list(chosen(CONDITIONS, ["I*", "See"], None)) == [BASELINE, "See", "ICD"]
    assert list(chosen(CONDITIONS, [], ['own={"sage": {"see": {"alpha": 0.25}}}'])) == [BASELINE, "own"]
    with pytest.raises(ValueError, match=r"^--conditions: unknown 'Sea'; there are 'baseline', 'See', 'ICD'$"):
        chosen(CONDITIONS, ["Sea"], None)
    with pytest.raises(ValueError, match=r"^--condition own: .*'sage.see.alpha'"):
        chosen(CONDITIONS, None, ['own={"sage": {"see": {"alpha": -9}}}'])
    for wrong in ("own", 'own={"sage": tru}', "own=[]", "own=" + "[" * 100_000):
        with pytest.raises(ValueError, match=r"^--condition own: NAME=JSON is needed, such as 'strong=.*; got 'own"):
            chosen(CONDITIONS, None, [wrong])


def test_every_intervention_that_needs_no_argument_is_known() -> None:
    assert {BASELINE, "SAGE", "VCD", "ICD", "PAI"} <= set(known())
    assert isinstance(known()["SAGE"][0], See)


def test_steering_uses_what_answers_has() -> None:
    asked = Wanted.of(["toward vision"], None, list).conditions(session("its own"))
    assert asked == {BASELINE: (), "toward vision": (Push("vision", "its own"),)}
    assert list(pushes("v", 0.5).values()) == [(Push("vision", "v", 0.5),), (Push("text", "v", 0.5),)]


def test_without_a_vector_steering_is_left_out_or_refused_where_it_was_named(caplog: Any) -> None:
    missing = VectorError("there is no vector")
    with caplog.at_level(logging.WARNING):
        assert list(Wanted.of(None, None, list).conditions(session(missing))) == list(known())
    assert "Steering is left out: there is no vector" in caplog.text
    with pytest.raises(VectorError, match="there is no vector"):
        Wanted.of(["toward *"], None, list).conditions(session(missing))
    with pytest.raises(ValueError, match="unknown 'toward nothing'"):
        Wanted.of(["toward nothing"], None, list)


def test_a_server_that_is_not_helmsight_is_told_what_can_be_said(caplog: Any) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("that is not a Helmsight server.")

    plain = SimpleNamespace(endpoint=SimpleNamespace(vector=refuse, check_interventions=refuse))
    told = {"refusal prompt": (RefusalPrompt(),)}
    with caplog.at_level(logging.WARNING):
        assert Wanted.of(None, None, list, told).conditions(plain) == {BASELINE: (), **told}
    assert "that is not a Helmsight server. Left out: SAGE, VCD, ICD, PAI." in caplog.text
    assert Wanted.of(["refusal*"], None, list, told).conditions(plain) == {BASELINE: (), **told}
    with pytest.raises(ValueError, match="not a Helmsight server"):
        Wanted.of(["refusal*", "VCD"], None, list, told).conditions(plain)


def test_quiet_says_nothing_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging as transformers_logging

    shown = []

    def load(*_: object, **__: object) -> None:
        shown.append(transformers_logging.is_progress_bar_enabled())
        raise ValueError("loaded")

    monkeypatch.setattr(steering, "load", load)
    transformers_logging.enable_progress_bar()
    for quiet in (True, False):
        with pytest.raises(ValueError, match="loaded"):
            ModelOptions("nowhere").engine(quiet)
    assert shown == [False, True]
