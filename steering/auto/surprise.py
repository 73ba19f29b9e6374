"""The surprise of a chat's text context to the model that will read it: a criterion of `toward: "auto"`.

s = -min over a context's tokens but the first of log p(token | the chat without images and contexts, the context as its
reply), in nats: how unlikely the least likely token is, if the model generated the context itself. A text with lost letters
or words has such a token. It measures only the text and knows nothing of the image, so where the text is not surprising
either both modalities are sound or the image is the damaged one; and a sound text in a wording that the model does not know
surprises as a damaged one does.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from steering.errors import Inapplicable
from steering.front.engine import Engine
from steering.front.turn import Begun, Turn, run_rounds
from steering.model.mllm import MLLM
from steering.prompt.chat import contexts_of, without_context, without_images
from steering.protocol.messages import chat_of
from steering.protocol.request import Request, Result, Sampling

MAX_CONTEXTS = 16
"""Maximum number of contexts of one chat that are scored: each is a prompt of its own."""


@dataclass(frozen=True)
class Surprise:
    """The surprise of one chat.

    value: s in nats, the largest of its contexts', None where none has a second token. bound: the value above which the text
    is distrusted. one_degraded: either text or image is known to be damaged. calibration: the digest of the calibration that
    the bound is from, None for the request's own.
    """

    value: float | None
    bound: float
    contexts: int
    one_degraded: bool = False
    calibration: str | None = None

    @property
    def toward(self) -> str | None:
        """Vision where the text is distrusted, text where the image must be the damaged one; None where it abstains."""
        if self.value is None:
            return None
        return "vision" if self.value > self.bound else "text" if self.one_degraded else None

    @property
    def abstained(self) -> str | None:
        """The reason why nothing is steered, None where something is."""
        if self.toward is not None:
            return None
        if self.value is None:
            return "The text context has no second token that could be surprising."
        return (
            f"The text context is not surprising: {self.value:.4g} is within the bound of {self.bound:.4g}. Nothing is "
            "known of the image."
        )

    def report(self) -> dict[str, Any]:
        """Return the measurements as JSON, as they appear in `applied`."""
        return {
            "criterion": "surprise",
            "surprise": self.value,
            "bound": self.bound,
            "contexts": self.contexts,
            "one_degraded": self.one_degraded,
            "abstained": self.abstained,
            "calibration": self.calibration,
        }


def bound_of(mllm: MLLM, bound: float | None) -> float:
    """Return the bound of surprise: the requested one, or the model's own.

    Raises RequestError where the model's was not measured, or where the model cannot read a text without an image.
    """
    if mllm.needs_images:
        raise Inapplicable(
            f"The criterion 'surprise' reads the text without images, which {mllm.name} cannot do.",
            param="steering.auto.criterion",
        )
    if bound is not None:
        return bound
    measured = None if mllm.calibration is None else mllm.calibration.surprise
    if measured is None:
        raise Inapplicable(
            f"{mllm.name} was not calibrated for the criterion 'surprise'; give 'steering.auto.bound', or run "
            "'helmsight probe --calibrate-surprise' on it.",
            param="steering.auto.bound",
        )
    return measured


def surprises(
    engine: Engine | Turn,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    begun: Begun | None = None,
    like: Request | None = None,
) -> list[tuple[float | None, int]]:
    """Return (s, number of contexts) of every chat, from one prefill a context, all in one batch.

    Among several contexts the most surprising counts. `begun` is as in `Engine.generate`; prompts are rendered, and cached,
    as those of the request `like`.

    Raises RequestError where a chat has no text context, or more than `MAX_CONTEXTS`.
    """
    return run_rounds(engine, surprising(chats, like), begun)


def surprising(
    chats: Sequence[Sequence[Mapping[str, Any]]], like: Request | None = None
) -> Generator[Iterable[Request], list[Result], list[tuple[float | None, int]]]:
    """Run the single round of `surprises`."""
    salt, variables = ("", {}) if like is None else (like.cache_salt, like.chat_template_kwargs)
    chats = [chat_of(chat) for chat in chats]
    replies = [contexts_of(chat) for chat in chats]
    for contexts in replies:
        if not 1 <= len(contexts) <= MAX_CONTEXTS:
            raise Inapplicable(
                f"The criterion 'surprise' weighs from 1 to {MAX_CONTEXTS} text contexts; the request has {len(contexts)}.",
                param="messages",
            )
    answers = yield (
        Request(bare, Sampling(max_tokens=1), reply=context, cache_salt=salt, chat_template_kwargs=variables)
        for chat, contexts in zip(chats, replies, strict=True)
        for bare in [_before_answer(without_images(without_context(chat)))]
        for context in contexts
    )
    results = iter(answers)
    surprises: list[tuple[float | None, int]] = []
    for contexts in replies:
        scores = [next(results).choices[0].reply_logprobs for _ in contexts]
        values = [-float(logprobs[1:].min()) for logprobs in scores if logprobs is not None and len(logprobs) > 1]
        surprises.append((max(values, default=None), len(contexts)))
    return surprises


def _before_answer(chat: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the chat up to the last message of its user."""
    return chat[: 1 + max((i for i, message in enumerate(chat) if message["role"] == "user"), default=-1)]
