"""Which modality carries an answer: `toward: "auto"` (modality-preference paper, section 5.3).

The plain answer's probability is compared with what it has without the images and without the text context; the modality
whose loss lowers it more is the reliable one, and the request is steered to it. Where the answer stands without either,
both carry it: which one weighs more is chance, and steering could only harm, so there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steering.admission import check_steer
from steering.engine import Engine
from steering.errors import RequestError
from steering.interventions.steer import Steer
from steering.layout import blanked, pictures_of, without_context, without_images
from steering.request import Request, Result, Sampling
from steering.vectors import SteeringVector

TOKENS = 32
"""How much of the plain answer is weighed, at most."""

TIE = 0.1
"""An answer that loses less than this share of its probability without a modality stands without it."""


@dataclass(frozen=True)
class Auto:
    """Steering whose way is still to be found; options as those of `Steer.to`."""

    vector: SteeringVector
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    tokens: str = "all"

    def toward(self, way: str, **more: Any) -> Steer:
        return Steer.to(self.vector, way, self.strength, layers=self.layers, tokens=self.tokens, **more)

    def steer(self, found: Reliability) -> Steer:
        """Toward the modality that was found, with strength 0 where it is undecided."""
        auto = replace(self, strength=0.0) if found.undecided else self
        return auto.toward(found.toward, auto=found.report())


@dataclass(frozen=True)
class Reliability:
    """The answer's probability with everything, without the images, and without the text context."""

    answer: float
    without_images: float
    without_context: float

    @property
    def toward(self) -> str:
        """The modality with the larger drop; vision where both are equal."""
        return "vision" if self.without_images <= self.without_context else "text"

    @property
    def undecided(self) -> bool:
        """Whether the answer stands without either modality."""
        return min(self.without_images, self.without_context) >= (1 - TIE) * self.answer

    def report(self) -> dict[str, float | bool]:
        return {
            "answer": self.answer,
            "without_images": self.without_images,
            "without_context": self.without_context,
            "drop_vision": self.answer - self.without_images,
            "drop_text": self.answer - self.without_context,
            "undecided": self.undecided,
        }


def measure(engine: Engine, chats: Sequence[Sequence[Mapping[str, Any]]]) -> list[Reliability]:
    """The reliability of both modalities in each chat; the plain answers run in one batch, then all reduced prompts.

    A model that cannot do without images is shown gray ones. Raises RequestError where a chat has no image or no text
    context.
    """
    unseen = blanked if engine.mllm.needs_images else without_images
    reduced = [(unseen(chat), without_context(chat)) for chat in chats]
    for chat, (_, unread) in zip(chats, reduced, strict=True):
        if not pictures_of(chat) or list(chat) == unread:
            raise RequestError(
                "'steering.toward': 'auto' needs an image and a text context in the request.", param="steering.toward"
            )
    plain = engine.generate([Request(chat, Sampling(max_tokens=TOKENS, logprobs=0)) for chat in chats])
    said = [_words(result) for result in plain]
    scored = engine.generate(
        Request(chat, Sampling(max_tokens=len(tokens), ignore_eos=True, logprobs=0), forced=tokens)
        for pair, tokens in zip(reduced, said, strict=True)
        for chat in pair
    )
    less = [_probability(result) for result in scored]
    pairs = zip(less[::2], less[1::2], strict=True)
    return [Reliability(_probability(result), *pair) for result, pair in zip(plain, pairs, strict=True)]


def decide(engine: Engine, request: Request, auto: Auto) -> Request:
    """The request, steered toward the modality that carries its answer; what was measured stands in `applied`."""
    check_steer(engine.mllm, auto.toward("vision"))  # before the work of measuring
    (found,) = measure(engine, [request.messages])
    return replace(request, steering=(auto.steer(found),))


def _words(result: Result) -> tuple[int, ...]:
    """An answer's tokens without the one that ends it, unless there is no other."""
    choice = result.choices[0]
    return choice.token_ids[: len(choice.logprobs or ())] or choice.token_ids


def _probability(result: Result) -> float:
    """Of an answer's tokens, that which ends it apart."""
    return math.exp(sum(one.logprob for one in result.choices[0].logprobs or ()))
