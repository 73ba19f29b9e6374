"""Confidence in an answer's tokens, and an alarm that tells from other readouts whether the answer may be wrong.

The alarm comes from no paper, but is measured for each model. `helmsight eval alarm` measures how well every number tells
wrong answers from right ones, and `--keep` stores the weighted sum of the cheap ones, with its threshold, in the model's
calibration.
"""

from __future__ import annotations

from typing import Any, ClassVar

from steering.protocol.readout import REGISTRY, Diagnose, FinishedAnswer, Quantity, Readout, Scalar
from steering.protocol.signals import Signal
from steering.readouts.decay import SPANS

READ = ("confidence", "focus", "modality", "decay")
"""The readouts that an alarm uses; they cost next to nothing, so that an alarm can accompany every answer."""


def numbers_of(names: tuple[str, ...] = READ) -> tuple[str, ...]:
    """Return the scalars of readouts that are quantities; integers are left out, because they number images."""
    return tuple(scalar for name in names for scalar, kind in REGISTRY[name].scalars.items() if kind is not int)


class ConfidenceReadout(Readout):
    """Mean and minimum log-probability of the answer's tokens, in nats, and the token with the minimum.

    They are those of `logprobs`: of the distribution before temperature and truncation, after contrasts, without the token
    that ends the answer.
    """

    name = "confidence"
    scalars: ClassVar[dict[str, type]] = {"mean_logprob": float, "least_logprob": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "mean_logprob": Quantity(
            "Mean log-probability of the answer's tokens", unit="nats", high=0.0,
            buckets=(-10, -5, -3, -2, -1.5, -1, -0.7, -0.5, -0.3, -0.2, -0.1, -0.05, -0.02, -0.01, -0.003, -0.001, 0),
        ),
        "least_logprob": Quantity(
            "Least log-probability of a token of the answer", unit="nats", high=0.0,
            buckets=(-20, -15, -10, -7, -5, -4, -3, -2, -1.5, -1, -0.7, -0.5, -0.3, -0.1, -0.03, -0.01, 0),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.LOGPROBS})

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        scores = answer.scores
        if not scores:
            return {"mean_logprob": None, "least_logprob": None, "least_token": None}
        least = min(range(len(scores)), key=scores.__getitem__)
        return {
            "mean_logprob": sum(scores) / len(scores),
            "least_logprob": scores[least],
            "least_token": {"index": least, "text": answer.context.token_text(answer.tokens[least])},
        }

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {name: report[name] for name in self.scalars}


class AlarmReadout(Readout):
    """The alarm's score, the log-odds that the answer is wrong, and whether it exceeds the threshold.

    All are None without a calibration, and with spans of the decay that it was not made with.
    """

    name = "alarm"
    calibrated_by = "alarm"
    options = (SPANS,)
    scalars: ClassVar[dict[str, type]] = {"alarm": bool, "alarm_score": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "alarm_score": Quantity(
            "Log-odds that the answer is wrong", unit="nats",
            buckets=(-10, -7, -5, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 5, 7, 10),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset().union(*(REGISTRY[name].signals(options) for name in READ))

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        alarm = answer.context.alarm if answer.options[SPANS] == SPANS.default else None
        if alarm is None:
            return {"alarm": None, "score": None, "threshold": None, "numbers": None, "calibration": None}
        numbers: dict[str, Any] = {}
        for name in READ:
            report = answer.report_of(name)
            numbers |= {} if report is None else REGISTRY[name].summary(report)
        score = alarm.score(numbers)
        return {
            "alarm": score > alarm.threshold,
            "score": score,
            "threshold": alarm.threshold,
            "numbers": {name: numbers.get(name) for name in alarm.numbers},
            "calibration": {
                "answers": alarm.answers,
                "raised": alarm.raised,
                "digest": answer.context.calibration,
            },
        }

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {"alarm": report["alarm"], "alarm_score": report["score"]}
