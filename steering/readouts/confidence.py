"""How sure the model was of what it said: the log-probabilities of the answer's tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, Scalar
from steering.protocol.signals import Signal


class ConfidenceReadout(Readout):
    """Their mean and the least of them, in nats, and the token that has it. They are what `logprobs` says: of the
    distribution before temperature and truncation, behind contrasts, without the token that ends the answer."""

    name = "confidence"
    scalars: ClassVar[dict[str, type]] = {"mean_logprob": float, "least_logprob": float}

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
            "least_token": {"index": least, "text": answer.around.token_text(answer.tokens[least])},
        }

    def summary(self, said: Any) -> dict[str, Scalar]:
        return {name: said[name] for name in self.scalars}
