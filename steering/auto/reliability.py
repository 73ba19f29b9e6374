"""Automatic choice of the steering direction, `toward: "auto"`, by one of two criteria.

`drop` (modality-preference paper, appendix E.5) compares the plain answer's probability with its probability without the
images and without the text context, and steers toward the modality whose loss lowers it more. That is what the answer rests
on, and so nearly always the side that the model follows anyway; it does not tell which side is right. Where the answer keeps
its probability without either modality, both support it and which one weighs more is chance, so nothing is steered.

`surprise` (see `surprise`) steers away from a text context that the model finds unlikely beyond a calibrated bound.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from steering.auto.surprise import Surprise, bound_of, surprising
from steering.errors import Inapplicable, RequestError
from steering.front.engine import Engine
from steering.front.turn import Begun, Turn, run_rounds
from steering.interventions.steer import Steer, Steering, check_steer
from steering.model.mllm import MLLM
from steering.prompt.chat import blanked, pictures_of, without_context, without_images
from steering.protocol.intervention import Prelude, Rounds
from steering.protocol.messages import chat_of
from steering.protocol.request import RENDERED_BY, Request, Result, Sampling
from steering.vectors.vector import SteeringVector

CRITERIA = ("drop", "surprise")
"""The names of the criteria."""

TOKENS = 32
"""Maximum number of tokens of the plain answer that are scored."""

TIE = 0.1
"""Share of its probability that an answer may lose without a modality and still count as standing without it."""


@dataclass(frozen=True)
class Criterion:
    """The criterion for the direction, one of `CRITERIA`, with its options.

    For surprise: the `bound` in nats, None for the model's calibrated one, and `one_degraded`, True where one of the two
    modalities is known to be damaged, so that a text within the bound is followed instead of steering nothing. Raises
    RequestError for a combination that is not allowed.
    """

    name: str = "drop"
    bound: float | None = None
    one_degraded: bool = False

    def __post_init__(self) -> None:
        if self.name not in CRITERIA:
            raise RequestError(
                f"'steering.auto.criterion' must be one of {', '.join(CRITERIA)}; got {self.name[:64]!r}.",
                param="steering.auto.criterion",
            )
        if self.bound is not None and not (math.isfinite(self.bound) and self.bound >= 0):
            raise RequestError(
                f"'steering.auto.bound' must be a finite number of at least 0; got {self.bound}.",
                param="steering.auto.bound",
            )
        for option, is_given in (("bound", self.bound is not None), ("one_degraded", self.one_degraded)):
            if is_given and self.name != "surprise":
                raise RequestError(
                    f"'steering.auto.{option}' goes with the criterion 'surprise', not {self.name!r}.",
                    param=f"steering.auto.{option}",
                )


DROP = Criterion()
"""The default criterion."""


@dataclass(frozen=True)
class Auto(Prelude):
    """Steering whose direction is found by asking the model first (modality-preference paper, appendix E.5).

    The options are those of `Steer.to`. `gate` is the report of an open gate.
    """

    path: ClassVar[tuple[str, ...]] = Steering.path

    vector: SteeringVector
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    tokens: str = "all"
    criterion: Criterion = DROP
    gate: Mapping[str, Any] | None = None

    def stated(self, way: str, **more: Any) -> Steer:
        """Return the steering once its direction is known, "vision" or "text"."""
        return Steer.to(self.vector, way, self.strength, layers=self.layers, tokens=self.tokens, gate=self.gate, **more)

    @property
    def vectors(self) -> Sequence[str]:
        return [self.vector.name]

    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        check_auto(mllm, self)  # before the work of measuring
        (result,) = yield from finding(mllm, [request.chat], self.criterion, request)
        return Steering((self.steer(result),))

    def steer(self, measurement: Reliability | Surprise) -> Steer:
        """Return the steering toward the modality that was found, with strength 0 where the criterion abstained."""
        if measurement.toward is None:
            return Steer(self.vector, 0.0, self.layers, self.tokens, auto=measurement.report(), gate=self.gate)
        return self.stated(measurement.toward, auto=measurement.report())


@dataclass(frozen=True)
class Reliability:
    """The answer's probability (0 to 1) with everything, without the images, and without the text context."""

    answer: float
    without_images: float
    without_context: float

    @property
    def larger(self) -> str:
        """The modality with the larger drop; vision where both are equal."""
        return "vision" if self.without_images <= self.without_context else "text"

    @property
    def undecided(self) -> bool:
        """True where the answer stands without either modality."""
        return min(self.without_images, self.without_context) >= (1 - TIE) * self.answer

    @property
    def toward(self) -> str | None:
        """The modality with the larger drop, None where the answer stands without either."""
        return None if self.undecided else self.larger

    @property
    def abstained(self) -> str | None:
        """The reason why nothing is steered, None where something is."""
        if not self.undecided:
            return None
        return f"The answer stands without either modality: it loses less than {TIE:.0%} of its probability."

    def report(self) -> dict[str, Any]:
        """Return the measurements as JSON, as they appear in `applied`."""
        return {
            "criterion": "drop",
            "answer": self.answer,
            "without_images": self.without_images,
            "without_context": self.without_context,
            "drop_vision": self.answer - self.without_images,
            "drop_text": self.answer - self.without_context,
            "abstained": self.abstained,
        }


Chats = Sequence[Sequence[Mapping[str, Any]]]
Finding = Generator[Iterable[Request], list[Result], Sequence["Reliability | Surprise"]]


def measure(
    engine: Engine | Turn, chats: Chats, begun: Begun | None = None, like: Request | None = None
) -> list[Reliability]:
    """Measure what the plain answer of each chat rests on; the answers run in one batch, then all reduced prompts.

    A model that needs images gets gray ones. Prompts are rendered, and cached, as those of the request `like`. Raises
    RequestError where a chat has no image or no text context.
    """
    return run_rounds(engine, measuring(engine.mllm, chats, like), begun)


def measuring(
    mllm: MLLM, chats: Chats, like: Request | None = None
) -> Generator[Iterable[Request], list[Result], list[Reliability]]:
    """Run the rounds of `measure`."""
    alike = {} if like is None else {name: getattr(like, name) for name in ("cache_salt", *RENDERED_BY)}
    chats = [chat_of(chat) for chat in chats]
    for chat in chats:
        _check_chat(chat)
    unseen = blanked if mllm.needs_images else without_images
    reduced = [(unseen(chat), without_context(chat)) for chat in chats]
    plain = yield (Request(chat, Sampling(max_tokens=TOKENS, logprobs=0), **alike) for chat in chats)
    replies = [_words(result) for result in plain]
    scored = yield (
        Request(chat, Sampling(max_tokens=len(tokens), ignore_eos=True, logprobs=0), forced=tokens, **alike)
        for pair, tokens in zip(reduced, replies, strict=True)
        for chat in pair
    )
    less = [_probability(result) for result in scored]
    pairs = zip(less[::2], less[1::2], strict=True)
    return [Reliability(_probability(result), *pair) for result, pair in zip(plain, pairs, strict=True)]


def find(
    engine: Engine | Turn,
    chats: Chats,
    criterion: Criterion = DROP,
    begun: Begun | None = None,
    like: Request | None = None,
) -> Sequence[Reliability | Surprise]:
    """Apply a criterion to each chat, which must have an image and a text context; `like` is as in `measure`.

    Raises RequestError where a chat lacks either, or the model was not calibrated for the criterion.
    """
    return run_rounds(engine, finding(engine.mllm, chats, criterion, like), begun)


def finding(mllm: MLLM, chats: Chats, criterion: Criterion = DROP, like: Request | None = None) -> Finding:
    """Run the rounds of `find`."""
    if criterion.name == "drop":
        return (yield from measuring(mllm, chats, like))
    bound = bound_of(mllm, criterion.bound)
    chats = [chat_of(chat) for chat in chats]
    for chat in chats:
        _check_chat(chat)
    surprises = yield from surprising(chats, like)
    measured = None if criterion.bound is not None or mllm.calibration is None else mllm.calibration.digest
    return [Surprise(value, bound, count, criterion.one_degraded, measured) for value, count in surprises]


def check_auto(mllm: MLLM, auto: Auto) -> None:
    """Raise VectorError or RequestError unless a direction can be found for a model, and its vector be added."""
    check_steer(mllm, auto.stated("vision"))
    if auto.criterion.name == "surprise":
        bound_of(mllm, auto.criterion.bound)


def _check_chat(chat: Sequence[Mapping[str, Any]]) -> None:
    if not pictures_of(chat) or list(chat) == without_context(chat):
        raise Inapplicable(
            "'steering.toward': 'auto' needs an image and a text context in the request.", param="steering.toward"
        )


def _words(result: Result) -> tuple[int, ...]:
    """Return an answer's tokens without the one that ends it, unless there is no other."""
    choice = result.choices[0]
    return choice.token_ids[: len(choice.logprobs or ())] or choice.token_ids


def _probability(result: Result) -> float:
    """Return the probability of an answer's tokens, without the one that ends it."""
    return math.exp(sum(token.logprob for token in result.choices[0].logprobs or ()))
