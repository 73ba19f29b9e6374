"""Prompts in which nothing conflicts, which show the side effects of steering on a model that has nothing to decide.

The effects are the shift of the next token's distribution, and the repetition in answers (too strong a push leads to
"repetitive and meaningless outputs", modality-preference paper, section 5.2).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch

from probes.answering.base import Answerer, Chat, Push, Question
from probes.answering.progress import tracked
from probes.answering.replies import replies
from probes.answering.requests import request
from probes.conflicts.samples import ConflictSample
from steering import Engine, Request, Steer

DESCRIBE = "Describe the image."
MAX_TOKENS = 64
NGRAM = 4


def chats(samples: Sequence[ConflictSample]) -> list[Chat]:
    """Return two chats per image, its open question and a request to describe it, without text context or options."""
    return [
        [{"role": "user", "content": [{"type": "image", "image": sample.picture()}, {"type": "text", "text": text}]}]
        for sample in samples
        for text in (sample.question, DESCRIBE)
    ]


def shift(
    engine: Engine, chats: Sequence[Chat], steers: Sequence[Steer], *, title: str = "", quiet: bool = False
) -> list[float]:
    """Return for every steering the mean over chats of the next token's KL(unsteered || steered), in nats."""

    def requests() -> Iterator[Request]:
        for chat in chats:
            for steering in ((), *((steer,) for steer in steers)):
                yield request(chat, steering, states=True)

    total = torch.zeros(len(steers), dtype=torch.float64)
    logprobs = (result.choices[0].next_logprobs for result in engine.stream(requests()))
    for _ in tracked(chats, len(chats), title, unit="prompts", quiet=quiet):
        plain = next(logprobs)
        for number in range(len(steers)):
            steered = next(logprobs)
            assert plain is not None
            assert steered is not None
            # A token to which float32 gives zero probability adds nothing, instead of 0 * infinity.
            terms = plain.exp() * (plain - steered).nan_to_num()
            total[number] += terms.sum().double()
    return (total / max(len(chats), 1)).tolist()


def repetitions(
    answerer: Answerer,
    chats: Sequence[Chat],
    pushes: Sequence[Push | None],
    *,
    title: str = "",
    quiet: bool = False,
) -> list[float]:
    """Return the mean `repetition` of the answers for every push."""
    questions = (Question(chat, push, MAX_TOKENS) for chat in chats for push in pushes)
    parts = ["steered" if push else "plain" for _ in chats for push in pushes]
    answers = replies(answerer, questions, parts, title=title, quiet=quiet)
    values = [repetition(reply.text) for reply in answers]
    return [sum(values[number :: len(pushes)]) / max(len(chats), 1) for number in range(len(pushes))]


def repetition(text: str) -> float:
    """Return the share of the text's four-word runs that occurred before in it (seq-rep-4; Welleck et al., 2020), 0 to 1."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    runs = list(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
