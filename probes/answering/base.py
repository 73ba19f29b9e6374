"""A benchmark's questions, and the protocol of an answerer: an engine in this process or a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from steering import DROP, Criterion, Diagnose, Options, SteeringVector

Chat = Sequence[Mapping[str, Any]]

MODALITY = Diagnose(frozenset({"modality"}))
"""The readout with the attention ratio."""

SIGNS = {"plus": 1.0, "minus": -1.0}
"""The sign of a push in terms of the vector's own direction."""


@dataclass(frozen=True)
class Push:
    """Steering with a vector.

    `toward` is a side, "auto" for the one that the criterion finds, or "plus" and "minus" for the direction in which the
    vector was measured and its opposite, which need no modality preference. A server knows the vector by its name. `layers`
    default to the vector's own.
    """

    toward: Literal["vision", "text", "auto", "plus", "minus"]
    vector: SteeringVector | str
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    criterion: Criterion = DROP


@dataclass(frozen=True)
class Question:
    """A chat in the Hugging Face format (images are PIL images), with how it is answered.

    Decoding is greedy unless a `temperature` is given, with a `seed`. `diagnose` are the readouts beside the answer, if the
    answerer has any. `logprobs` requests the log-probabilities of its tokens, `odds` the log-odds of "yes" against "no" at
    its first one. `force` is a given answer that is read instead
    of generated; only Helmsight can do that.
    """

    chat: Chat
    push: Push | None = None
    max_tokens: int = 24
    interventions: tuple[Options, ...] = ()
    diagnose: Diagnose | None = MODALITY
    logprobs: bool = False
    odds: bool = False
    force: str | None = None
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """An answer with its optional measurements.

    `diagnostics` are as in the wire protocol, `auto` is the decision of "auto", `logprobs` are the log-probabilities of the
    answer's tokens and `odds` the log-odds of "yes" (nats), each where requested and available. `kept` marks an answer taken
    from the ledger. `error` says why there is no answer, for an answerer that continues after failures (`patient.Patient`).
    """

    text: str
    diagnostics: Mapping[str, Any] | None = None
    auto: Mapping[str, Any] | None = None
    logprobs: Sequence[float] | None = None
    odds: float | None = None
    kept: bool = field(default=False, compare=False)
    error: str | None = None

    @property
    def attention_ratio(self) -> float | None:
        """The attention ratio from 0, the text context, to 1, the images; None if it was not measured or is undefined."""
        modality = (self.diagnostics or {}).get("modality")
        return None if modality is None else modality["attention_ratio"]


class Unanswered(ValueError):
    """A server gave no valid answer, even after retries."""


class Answerer(Protocol):
    """An object that answers questions."""

    @property
    def identity(self) -> str:
        """All that the answers depend on besides the questions: the weights, and how they are run."""

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        """Yield the replies in the order of the questions, which are taken as they are needed."""
