"""Prompts in which nothing conflicts, to see what steering does to a model where it has nothing to decide.

How far the next token's distribution moves, and how much answers repeat themselves (too strong a push leads to "repetitive
and meaningless outputs", modality-preference paper, section 5.2).
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
    """Each image with its open question, and each to be described; no text context, no options."""
    return [
        [{"role": "user", "content": [{"type": "image", "image": sample.picture()}, {"type": "text", "text": text}]}]
        for sample in samples
        for text in (sample.question, DESCRIBE)
    ]


def shift(
    engine: Engine, asked: Sequence[Chat], steers: Sequence[Steer], *, title: str = "", quiet: bool = False
) -> list[float]:
    """For every steering the mean over chats of KL(unsteered || steered) of the next token's distribution, in nats."""

    def requests() -> Iterator[Request]:
        for chat in asked:
            for steering in ((), *((steer,) for steer in steers)):
                yield request(chat, steering, states=True)

    total = torch.zeros(len(steers), dtype=torch.float64)
    said = (result.choices[0].next_logprobs for result in engine.stream(requests()))
    for _ in tracked(asked, len(asked), title, unit="prompts", quiet=quiet):
        plain = next(said)
        for number in range(len(steers)):
            steered = next(said)
            assert plain is not None
            assert steered is not None
            # A token that float32 gives no probability at all adds nothing, rather than 0 * infinity.
            terms = plain.exp() * (plain - steered).nan_to_num()
            total[number] += terms.sum().double()
    return (total / max(len(asked), 1)).tolist()


def repetitions(
    answerer: Answerer,
    asked: Sequence[Chat],
    pushes: Sequence[Push | None],
    *,
    title: str = "",
    quiet: bool = False,
) -> list[float]:
    """For every push the mean `repetition` of the answers."""
    questions = (Question(chat, push, MAX_TOKENS) for chat in asked for push in pushes)
    parts = ["steered" if push else "plain" for _ in asked for push in pushes]
    said = replies(answerer, questions, parts, title=title, quiet=quiet)
    found = [repetition(reply.text) for reply in said]
    return [sum(found[number :: len(pushes)]) / max(len(asked), 1) for number in range(len(pushes))]


def repetition(text: str) -> float:
    """Share of the text's runs of four words that occurred before in it (seq-rep-4; Welleck et al., 2020); 0 to 1."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    runs = list(zip(*(words[start:] for start in range(NGRAM)), strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0
