"""The conditions of benchmarks: which are known, how they are chosen, where steering's vector comes from."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import steering
from probes.answering.base import Push, Question
from probes.harness.comparison import BASELINE
from probes.harness.conditions import Wanted, chosen, default_conditions, pushes
from probes.harness.ledger import key
from probes.harness.options import ModelOptions
from probes.harness.session import Session
from steering import RefusalPrompt, See, VectorError
from steering.interventions.project_out import ProjectOut
from steering.readiness import PARTS, PartState, states
from tests.probes.harness.toy import CONDITIONS


class Stub(SimpleNamespace):
    """A session of the given parts, of a model that was prepared with `measured`."""

    measured: tuple[str, ...] = tuple(part.measured for part in PARTS)
    lack = Session.lack

    def __init__(self, **fields: Any) -> None:
        super().__init__(lacks=[], **fields)

    def prepared(self) -> list[PartState]:
        return states(self.measured)


def session(found: Any, **more: Any) -> Any:
    """Return a session with a server that has that vector, or raises that error."""

    def vector(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    return Stub(endpoint=SimpleNamespace(vector=vector, check_interventions=lambda: None), **more)


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
    assert {BASELINE, "SAGE", "VCD", "ICD", "PAI"} <= set(default_conditions())
    assert isinstance(default_conditions()["SAGE"][0], See)


def test_steering_uses_what_answers_has() -> None:
    conditions = Wanted.of(["toward vision"], None, list).conditions(session("its own"))
    assert conditions == {BASELINE: (), "toward vision": (Push("vision", "its own"),)}
    assert list(pushes("v", 0.5).values()) == [(Push("vision", "v", 0.5),), (Push("text", "v", 0.5),)]


def test_without_a_vector_steering_is_left_out_or_refused_where_it_was_named(caplog: Any) -> None:
    missing = VectorError("there is no vector")
    with caplog.at_level(logging.WARNING):
        assert list(Wanted.of(None, None, list).conditions(session(missing))) == list(default_conditions())
    assert "Steering is left out: there is no vector" in caplog.text
    with pytest.raises(VectorError, match="there is no vector"):
        Wanted.of(["toward *"], None, list).conditions(session(missing))
    with pytest.raises(ValueError, match="unknown 'toward nothing'"):
        Wanted.of(["toward nothing"], None, list)


def test_left_out_and_uncalibrated_conditions_are_noted_for_the_report(caplog: Any) -> None:
    noting = session(VectorError("there is no vector"), measured=("sinks",))
    own_conditions = ['own={"sage": {"think": {"threshold": 1.0}}}', 'rough={"sage": {"think": true}}']
    with caplog.at_level(logging.WARNING):
        Wanted.of(None, own_conditions, list).conditions(noting)
    steering_left_out, rough = noting.lacks
    assert steering_left_out == "Steering is left out: there is no vector"
    assert rough == (
        "SAGE, rough without calibration: sage.think: it uses rough thresholds of two prompts, since this model has no "
        "calibration for it (helmsight probe --calibrate-sage)."
    )
    assert rough in caplog.text
    calibrated = session("its own")
    Wanted.of(None, own_conditions, list).conditions(calibrated)
    assert calibrated.lacks == []


def in_process(folder: Any, fingerprint: str = "f" * 32) -> Any:
    """Return a session that asks a model of this process, whose vectors lie in `folder`."""
    model = SimpleNamespace(path=str(folder))
    engine = SimpleNamespace(mllm=SimpleNamespace(fingerprint=fingerprint))
    return Stub(endpoint=None, engine=engine, setup=SimpleNamespace(model=model))


def test_vectors_among_options_are_looked_up_in_process(tmp_path: Path, caplog: Any) -> None:
    weights = torch.ones(2)
    vector = steering.SteeringVector("modality-preference", torch.ones(2, 3), weights, weights, weights, (1,), "f" * 32)
    vector.save(tmp_path / "vectors" / "modality-preference.safetensors")
    own_conditions = ['mine={"project_out": {"vector": "modality-preference", "layers": [1]}}']
    conditions = Wanted.of(["project_out"], own_conditions, list).conditions(in_process(tmp_path))
    (plain,), (mine,) = conditions["project_out"], conditions["mine"]
    assert isinstance(plain, ProjectOut)
    assert isinstance(mine, ProjectOut)
    assert isinstance(plain.vector, steering.SteeringVector)
    assert plain.vector.digest == vector.digest
    assert mine.layers == [1]
    with caplog.at_level(logging.WARNING):
        assert "project_out" not in Wanted.of(None, None, list).conditions(in_process(tmp_path / "elsewhere"))
    assert "project_out is left out: There is no steering vector 'modality-preference'" in caplog.text
    for patterns, more in ((["project_out"], None), (["See"], own_conditions)):
        with pytest.raises(VectorError):
            Wanted.of(patterns, more, list, {"See": (See(),)}).conditions(in_process(tmp_path / "elsewhere"))
    asked = Wanted.of(["project_out"], None, list).conditions(session("its own"))  # a server looks them up by itself
    assert asked["project_out"] == (ProjectOut(),)


def test_a_vector_of_the_same_name_is_another_question() -> None:
    weights = torch.ones(2)

    def asked(direction: float) -> str:
        vector = steering.SteeringVector("v", direction * torch.ones(2, 3), weights, weights, weights, (1,), "f" * 32)
        return key("model", Question([], interventions=(ProjectOut(vector=vector),)))

    assert asked(1.0) == asked(1.0) != asked(2.0)


def test_conditions_of_another_server_are_limited_to_its_protocol(caplog: Any) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("that is not a Helmsight server.")

    plain = Stub(endpoint=SimpleNamespace(vector=refuse, check_interventions=refuse))
    special = {"refusal prompt": (RefusalPrompt(),)}
    with caplog.at_level(logging.WARNING):
        assert Wanted.of(None, None, list, special).conditions(plain) == {BASELINE: (), **special}
    left_out = "SAGE, look_at, project_out, VCD, ICD, PAI, M3ID, AGLA, vista, only, dola, opera"
    assert f"that is not a Helmsight server. Left out: {left_out}." in caplog.text
    assert Wanted.of(["refusal*"], None, list, special).conditions(plain) == {BASELINE: (), **special}
    with pytest.raises(ValueError, match="not a Helmsight server"):
        Wanted.of(["refusal*", "VCD"], None, list, special).conditions(plain)


def test_quiet_prints_nothing_while_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import logging as transformers_logging

    states = []

    def load(*_: object, **__: object) -> None:
        states.append(transformers_logging.is_progress_bar_enabled())
        raise ValueError("loaded")

    monkeypatch.setattr(steering, "load", load)
    transformers_logging.enable_progress_bar()
    for quiet in (True, False):
        with pytest.raises(ValueError, match="loaded"):
            ModelOptions("nowhere").engine(quiet)
    assert states == [False, True]
