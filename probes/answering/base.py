"""What a benchmark asks, and the protocol of what answers: an engine in this process or a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from steering import DROP, Criterion, Diagnose, Options, SteeringVector

Chat = Sequence[Mapping[str, Any]]

MODALITY = Diagnose(frozenset({"modality"}))
"""The readout with the attention ratio."""

SIGNS = {"plus": 1.0, "minus": -1.0}
"""Of a push by the vector's own sign."""


@dataclass(frozen=True)
class Push:
    """Steering: toward a side, with "auto" the way that the criterion finds, with "plus" and "minus" the way that the vector
    was measured and the other one, which needs no modality preference. A server knows the vector by its name.
    `layers` are the vector's own unless given."""

    toward: Literal["vision", "text", "auto", "plus", "minus"]
    vector: SteeringVector | str
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    criterion: Criterion = DROP


@dataclass(frozen=True)
class Question:
    """A chat in the Hugging Face format (images are PIL images) and how it is to be answered: greedily, unless a
    `temperature` is given, with a `seed`.

    `diagnose` are the readouts beside the answer, where what answers has any. `logprobs` asks for the log-probabilities of
    its tokens. `force` is an answer that is given, and read instead of generated; only Helmsight can.
    """

    chat: Chat
    push: Push | None = None
    max_tokens: int = 24
    interventions: tuple[Options, ...] = ()
    diagnose: Diagnose | None = MODALITY
    logprobs: bool = False
    force: str | None = None
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer; where they were asked for and could be had, the `diagnostics` as the wire protocol has them, what "auto"
    found, and the log-probabilities (nats) of the answer's tokens. `kept` is one that was not asked for now but
    remembered. `error`: why there is no answer, of what goes on without (`patient.Patient`)."""

    text: str
    diagnostics: Mapping[str, Any] | None = None
    auto: Mapping[str, Any] | None = None
    logprobs: Sequence[float] | None = None
    kept: bool = field(default=False, compare=False)
    error: str | None = None

    @property
    def attention_ratio(self) -> float | None:
        """From 0, the text context, to 1, the images; None where it was not measured, or is not defined."""
        modality = (self.diagnostics or {}).get("modality")
        return None if modality is None else modality["attention_ratio"]


class Unanswered(ValueError):
    """A server did not answer, or not with an answer, also when it was asked again."""


class Answerer(Protocol):
    """Answers questions."""

    @property
    def identity(self) -> str:
        """What the answers depend on besides the questions: the weights, and how they are run."""

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        """The replies in the order of the questions, which are taken as they are needed."""
