"""An answerer that asks an engine in this process."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator

from PIL import Image

from probes.answering.base import SIGNS, Chat, Question, Reply
from probes.answering.odds import ALTERNATIVES, log_odds
from probes.answering.requests import request
from probes.answering.versions import versions
from steering import (
    MLLM,
    Auto,
    Engine,
    Reliability,
    Request,
    Sampling,
    Steer,
    Surprise,
    decide,
    find,
)
from steering.prompt.chat import GRAY, pictures_of

_NOTHING = {"type": "image", "image": Image.new("RGB", (224, 224), GRAY)}


class InProcess:
    """The answers of an engine, batched.

    A model that needs an image is shown a gray one where a question has none.
    """

    AUTO_AT_ONCE = 64
    """The most questions whose steering direction is found in one batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def identity(self) -> str:
        mllm = self.engine.mllm
        template = hashlib.sha256(mllm.chat.text.encode()).hexdigest()[:16]
        about = mllm.fingerprint, template, str(mllm.quantization or mllm.dtype)
        return " ".join((*about, *versions().values(), *_thresholds(mllm)))

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        ways: deque[Reliability | Surprise | None] = deque()

        def requests() -> Iterator[Request]:
            for question, decision in self._measured(questions):
                ways.append(decision)
                yield decide(self.engine, self._request(question, decision))

        for result in self.engine.stream(requests()):
            choice, decision = result.choices[0], ways.popleft()
            auto = None if decision is None else {"toward": decision.toward, **decision.report()}
            logprobs = None if choice.logprobs is None else [token.logprob for token in choice.logprobs]
            first = choice.logprobs[0].top if choice.logprobs else ()
            odds = log_odds((token.token, token.logprob) for token in first) if first else None
            yield Reply(choice.text, choice.diagnostics, auto, logprobs, odds)

    def _measured(self, questions: Iterable[Question]) -> Iterator[tuple[Question, Reliability | Surprise | None]]:
        """Yield every question with the decision of "auto" for it, None if the direction is stated."""
        remaining = iter(questions)
        while part := list(itertools.islice(remaining, self.AUTO_AT_ONCE)):
            criteria = [
                question.push.criterion if question.push and question.push.toward == "auto" else None
                for question in part
            ]
            decisions: list[Reliability | Surprise | None] = [None] * len(part)
            for criterion in dict.fromkeys(criteria):
                if criterion is not None:
                    own = [i for i, other in enumerate(criteria) if other == criterion]
                    ways = find(self.engine, [part[i].chat for i in own], criterion)
                    for i, way in enumerate(ways):
                        decisions[own[i]] = way
            yield from zip(part, decisions, strict=True)

    def _request(self, question: Question, decision: Reliability | Surprise | None) -> Request:
        steers: tuple[Steer, ...] = ()
        if (push := question.push) is not None:
            if isinstance(push.vector, str):
                raise ValueError(f"In process, give the vector {push.vector!r} as an object, not by its name.")
            if push.toward in SIGNS:
                steers = (Steer(push.vector, SIGNS[push.toward] * push.strength, push.layers),)
            else:
                auto = Auto(push.vector, push.strength, push.layers)
                steers = (auto.stated(push.toward) if decision is None else auto.steer(decision),)
        return request(
            with_picture(self.engine.mllm, question.chat),
            (*steers, *question.interventions),
            sampling=Sampling(
                max_tokens=question.max_tokens if question.force is None else None,
                logprobs=ALTERNATIVES if question.odds else 0 if question.logprobs else None,
                temperature=question.temperature,
                seed=question.seed if question.temperature else None,
            ),
            diagnose=question.diagnose,
            forced=() if question.force is None else question.force,
        )


def with_picture(mllm: MLLM, chat: Chat) -> Chat:
    """Return the chat, with a gray picture added if it has none and the model needs one."""
    if pictures_of(chat) or not mllm.needs_images:
        return chat
    *before, last = chat
    content = last["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*before, {**last, "content": [_NOTHING, *parts]}]


def _thresholds(mllm: MLLM) -> tuple[str, ...]:
    """Return a digest of the data that sets Think's thresholds, if the model's folder has them."""
    if mllm.calibration is None or mllm.calibration.divergence is None:
        return ()
    return (hashlib.sha256(repr(mllm.calibration.divergence).encode()).hexdigest()[:16],)
