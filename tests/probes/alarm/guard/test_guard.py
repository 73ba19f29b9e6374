"""A guard's effect: shares by hand, the guard's rule, and a run on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probes.alarm.guard.evaluate import GuardTries, ask, evaluate
from probes.alarm.guard.run import GuardOptions
from probes.alarm.samples import Checked
from probes.answering.base import Question, Reply
from server.cli import main
from steering import NumberCondition, See, conditioned
from tests.probes.alarm.test_alarm import IMAGE

pytestmark = pytest.mark.usefixtures("few_resamples")


def bits(text: str) -> np.ndarray:
    return np.array([character == "1" for character in text])


def test_shares_by_hand() -> None:
    tries = GuardTries(
        plain=bits("0000111111"), changed=bits("1100011111"), raised=bits("1110110000"), still=bits("0100010000")
    )
    # Kept are the changed answers of questions 1, 3 and 5: the first is mended, the fifth broken.
    assert tries.guarded.tolist() == bits("1000011111").tolist()
    found = evaluate(tries)
    shares = {name: found[name]["share"] for name in ("caught", "mended", "raised", "broken", "given_again", "kept")}
    assert shares == pytest.approx(
        {"caught": 3 / 4, "mended": 1 / 4, "raised": 2 / 6, "broken": 1 / 6, "given_again": 0.5, "kept": 0.3}
    )
    accuracy = {name: value["share"] for name, value in found["accuracy"].items()}
    assert accuracy == pytest.approx({"never": 0.6, "always": 0.7, "guarded": 0.6})
    assert found["gain"]["always"]["difference"] == pytest.approx(-0.1)
    low, high = found["caught"]["share_95"]
    assert low < 0.75 < high
    assert found["broken"]["n"] == 6


class Scripted:
    """Answers plainly "red" with a low score, under an intervention "blue" with a high one."""

    identity = "scripted"

    def answers(self, questions: Any) -> Iterator[Reply]:
        for question in questions:
            assert isinstance(question, Question)
            changed = bool(question.interventions)
            numbers = {"mean_logprob": -0.1 if changed else -2.0, "least_logprob": -3.0}
            yield Reply("blue" if changed else "red", {"confidence": numbers})


def test_both_answers_are_judged_by_their_own_numbers() -> None:
    samples = [Checked((IMAGE,), "Which?", (colour,)) for colour in ("red", "blue")]
    low, high = NumberCondition.written("mean_logprob < -1"), NumberCondition.written("least_logprob<0")
    tries = ask(Scripted(), samples, [low], (See(),), every=False, quiet=True)
    assert (tries.plain.tolist(), tries.changed.tolist()) == ([True, False], [False, True])
    assert (tries.raised.tolist(), tries.still.tolist()) == ([True, True], [False, False])
    tries = ask(Scripted(), samples, [low, high], (See(),), every=False, quiet=True)
    assert tries.still.tolist() == [True, True], "the other condition still holds"
    tries = ask(Scripted(), samples, [low, high], (See(),), every=True, quiet=True)
    assert tries.still.tolist() == [False, False]


def test_conditions_are_written_as_on_a_command_line() -> None:
    assert {"alarm", "focus_share", "attention_ratio"} <= conditioned().keys()
    assert NumberCondition.written("alarm").holds(value=True)
    assert not NumberCondition.written("alarm").holds(value=False)
    assert NumberCondition.written("alarm=false").holds(value=False)
    share = NumberCondition.written("focus_share <= .5")
    assert [share.holds(value) for value in (0.5, 0.6, None)] == [True, False, False]
    assert share.text == "focus_share<=0.5"
    for wrong in ("alarm<1", "focus_share", "focus_share<much", "focus_share<1e999"):
        with pytest.raises(ValueError, match="must be"):
            NumberCondition.written(wrong)
    for unknown in ("unheard<1", "", "< 5"):
        with pytest.raises(KeyError):
            NumberCondition.written(unknown)


@pytest.mark.parametrize(
    ("when", "then", "match"),
    [
        (["unheard"], "SAGE", "^--when: 'unheard'"),
        (["alarm<1"], "SAGE", "^--when: .*true or false"),
        (["alarm"], "NONE", "^--then: unknown 'NONE'"),
        (["alarm"], "mine={bad", "^--then mine: NAME=JSON is needed"),
    ],
)
def test_what_is_no_guard_is_refused_before_a_model_is_loaded(when: list[str], then: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        GuardOptions.of(when, "any", then, "modality-preference", list, None, (0.0,), lambda *args: [])


def test_it_runs_on_the_embedded_model(tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = ["--limit", "12", "--noise", "150", "--when", "mean_logprob<-.2", "--then", "VCD", "--quiet"]
    assert main(["eval", "guard", *flags, "--out", str(out)]) == 0
    found = json.loads((out / "report.json").read_text())
    assert found["answers"] == 12
    assert found["about"]["then"] == "VCD"
    assert found["about"]["when"] == ["mean_logprob<-0.2"]
    assert found["accuracy"]["guarded"]["n"] == 12
    assert "the guard's gain" in (out / "report.md").read_text()
