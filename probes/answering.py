"""Who answers a benchmark's questions: an engine in this process, or, in `probes.endpoint`, a server."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from PIL import Image

from probes.versions import versions
from steering import (
    DROP,
    Auto,
    Criterion,
    Diagnose,
    Engine,
    Reliability,
    Request,
    Sampling,
    Steer,
    SteeringVector,
    Surprise,
    find,
)
from steering.prompt.chat import GRAY, pictures_of

Chat = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Push:
    """Steering: toward a side, or, with "auto", the way that the criterion finds. A server knows the vector by its name.
    `layers` are the vector's own unless given."""

    toward: Literal["vision", "text", "auto"]
    vector: SteeringVector | str
    strength: float = 1.0
    layers: tuple[int, ...] | None = None
    criterion: Criterion = DROP


@dataclass(frozen=True)
class Question:
    """A chat in the Hugging Face format (images are PIL images) and how it is to be answered, always greedily."""

    chat: Chat
    push: Push | None = None
    max_tokens: int = 24


@dataclass(frozen=True)
class Reply:
    """An answer; where they were measured, the attention ratio (0 text context to 1 images) and what "auto" found."""

    text: str
    attention_ratio: float | None = None
    auto: Mapping[str, Any] | None = None


class Answerer(Protocol):
    """Answers questions."""

    @property
    def identity(self) -> str:
        """What the answers depend on besides the questions: the weights, and how they are run."""

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        """The replies in the order of the questions, which are taken as they are needed."""


_NOTHING = {"type": "image", "image": Image.new("RGB", (224, 224), GRAY)}


class InProcess:
    """An engine's answers, batched. A model that cannot do without images is shown a gray one where a question has none."""

    AUTO_AT_ONCE = 64
    """Questions whose way is found in one batch."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def identity(self) -> str:
        mllm = self.engine.mllm
        return " ".join((mllm.fingerprint, str(mllm.dtype), *versions().values()))

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        ways: deque[Reliability | Surprise | None] = deque()

        def requests() -> Iterator[Request]:
            for question, found in self._measured(questions):
                ways.append(found)
                yield self._request(question, found)

        for result in self.engine.stream(requests()):
            choice, found = result.choices[0], ways.popleft()
            ratio = (choice.diagnostics or {})["modality"]["attention_ratio"]
            yield Reply(choice.text, ratio, None if found is None else {"toward": found.toward, **found.report()})

    def _measured(self, questions: Iterable[Question]) -> Iterator[tuple[Question, Reliability | Surprise | None]]:
        """Every question with what "auto" finds for it, None where the way is stated."""
        rest = iter(questions)
        while part := list(itertools.islice(rest, self.AUTO_AT_ONCE)):
            criteria = [one.push.criterion if one.push and one.push.toward == "auto" else None for one in part]
            found: list[Reliability | Surprise | None] = [None] * len(part)
            for criterion in dict.fromkeys(criteria):
                if criterion is not None:
                    own = [i for i, one in enumerate(criteria) if one == criterion]
                    ways = find(self.engine, [part[i].chat for i in own], criterion)
                    for i, way in enumerate(ways):
                        found[own[i]] = way
            yield from zip(part, found, strict=True)

    def _request(self, question: Question, found: Reliability | Surprise | None) -> Request:
        steering: tuple[Steer, ...] = ()
        if (push := question.push) is not None:
            if isinstance(push.vector, str):
                raise ValueError(f"In process the vector {push.vector!r} must be given itself, not by name.")
            auto = Auto(push.vector, push.strength, push.layers)
            steering = (auto.toward(push.toward) if found is None else auto.steer(found),)
        diagnose = Diagnose(frozenset({"modality"}))
        chat = question.chat
        if not pictures_of(chat) and self.engine.mllm.needs_images:
            *before, last = chat
            chat = [*before, {**last, "content": [_NOTHING, *last["content"]]}]
        return Request(chat, Sampling(max_tokens=question.max_tokens), steering, diagnose=diagnose)
