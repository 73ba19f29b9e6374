"""The alarm and what it goes by: log-probabilities against those that the answer reports, the score by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from steering import Diagnose, Request, Sampling
from steering.errors import UnsupportedModel
from steering.model.alarm import Alarm
from steering.model.calibration import Calibration
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.readouts.matrices import STEPS, chats

ALARM = Alarm(
    {
        "least_logprob": {"centre": -1.0, "scale": 0.5, "weight": -2.0},
        "attention_ratio": {"centre": 0.3, "scale": 0.1, "weight": 1.0},
    },
    bias=-1.5, threshold=0.25, answers=100, raised={},
)  # fmt: skip


def test_the_score_is_the_sum_by_hand() -> None:
    """-1.5 - 2 (-2 + 1) / 0.5 + (0.4 - 0.3) / 0.1 = 3.5; what does not exist stands at its centre."""
    assert ALARM.score({"least_logprob": -2.0, "attention_ratio": 0.4}) == pytest.approx(3.5)
    assert ALARM.score({"least_logprob": -2.0, "attention_ratio": None}) == pytest.approx(2.5)
    assert ALARM.score({"least_logprob": math.nan}) == -1.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"numbers": {}},
        {"numbers": {"x": {"centre": 0.0, "scale": 1.0}}},
        {"numbers": {"x": {"centre": 0.0, "scale": 0.0, "weight": 1.0}}},
        {"bias": math.inf},
        {"threshold": None},
    ],
)
def test_what_is_no_alarm_is_refused(wrong: dict[str, Any]) -> None:
    content = {"numbers": dict(ALARM.numbers), "bias": 0.0, "threshold": 0.0, "answers": 1, "raised": {}} | wrong
    with pytest.raises(ValueError, match="must hold an alarm's"):
        Alarm.of(content)


def test_it_is_kept_with_the_model(tmp_path: Any) -> None:
    calibration = Calibration("print", alarm=ALARM)
    calibration.save(tmp_path)
    assert Calibration.load(tmp_path, "print", 4) == calibration
    (tmp_path / "calibration.json").write_text((tmp_path / "calibration.json").read_text().replace("0.25", "null"))
    with pytest.raises(UnsupportedModel, match="must hold an alarm's numbers"):
        Calibration.load(tmp_path, "print", 4)


def test_what_an_answer_says_of_itself(
    make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities equal the plain model's own generation, beside answers that request none and other readouts.

    The alarm follows from the other readouts.
    """
    engine, chat = make_engine("qwen2_vl"), chats()[0]
    assert engine.mllm.calibration is None
    calibration = Calibration(engine.mllm.fingerprint, alarm=ALARM)
    monkeypatch.setattr(engine.mllm, "calibration", calibration)
    asked = Diagnose(frozenset({"confidence", "alarm", "modality"}))
    sampling = Sampling(temperature=0, max_tokens=STEPS)
    results = engine.generate(
        [
            Request(chat, sampling),
            Request(chat, sampling, diagnose=asked),
            Request(chat, replace(sampling, logprobs=3)),
            Request(chat, sampling, diagnose=replace(asked, spans="content")),
        ]
    )
    bare, read, reported, other = (result.choices[0] for result in results)
    assert read.logprobs is None
    assert bare.token_ids == read.token_ids == reported.token_ids
    plain = load_plain("qwen2_vl").answer(chat, STEPS)
    tokens = [token for token in plain.tokens if token not in engine.mllm.stop_ids]
    expected = plain.logprobs[range(len(tokens)), tokens]
    said = read.diagnostics
    assert said is not None
    assert said["confidence"]["mean_logprob"] == pytest.approx(float(expected.mean()), abs=1e-5)
    assert said["confidence"]["least_logprob"] == pytest.approx(float(expected.min()), abs=1e-5)
    assert said["confidence"]["least_token"]["index"] == int(expected.argmin())
    ratio = said["modality"]["attention_ratio"]
    by_hand = -1.5 - 2 * (float(expected.min()) + 1) / 0.5 + (ratio - 0.3) / 0.1
    assert said["alarm"]["score"] == pytest.approx(by_hand, abs=1e-3)
    assert said["alarm"]["alarm"] is (by_hand > 0.25)
    assert said["alarm"]["numbers"]["attention_ratio"] == ratio
    assert other.diagnostics is not None
    assert other.diagnostics["alarm"]["alarm"] is None


def test_without_a_calibration_nothing_is_said(make_engine: MakeEngine) -> None:
    request = Request(chats()[0], Sampling(max_tokens=1), diagnose=Diagnose(frozenset({"alarm"})))
    (result,) = make_engine("qwen2_vl").generate([request])
    assert result.choices[0].diagnostics is not None
    assert set(result.choices[0].diagnostics["alarm"].values()) == {None}
