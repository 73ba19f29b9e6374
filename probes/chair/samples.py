"""Descriptions of pictures, and how much of what they name is there (Rohrbach et al. 2018, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from probes.answering.base import Chat, Reply
from probes.chair.words import Vocabulary
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.pictures import Source, chat

SHARES = {
    "chair_s": Share("hallucinating", "captions"),
    "chair_i": Share("wrong", "mentions", fixed=False),
    "recall": Share("found", "objects", fixed=False),
}


@dataclass(frozen=True)
class Described:
    """An image (or its file) and the objects that are there. `vocabulary` finds objects in a description."""

    image: Source
    objects: frozenset[str]
    vocabulary: Vocabulary
    question: str = "Please describe this image in detail."
    id: str | None = field(default=None, compare=False)

    @property
    def expected(self) -> list[str]:
        """What is there."""
        return sorted(self.objects)

    def chats(self) -> list[Chat]:
        """The question; raises ValueError where the image's file does not decode."""
        return [chat([self.image], self.question)]


def tally(sample: Described, replies: Sequence[Reply]) -> dict[str, float]:
    """What a description adds to the sums that `scores` takes; an object counts as often as it is mentioned."""
    (reply,) = replies
    named = sample.vocabulary.mentioned(reply.text)
    wrong = [name for name in named if name not in sample.objects]
    return {
        "captions": 1.0,
        "hallucinating": float(bool(wrong)),
        "mentions": float(len(named)),
        "wrong": float(len(wrong)),
        "found": float(len(sample.objects & {*named})),
        "objects": float(len(sample.objects)),
        "words": float(len(reply.text.split())),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """CHAIR_S, the share of descriptions that name an object that is not there; CHAIR_I, that of mentions that do; recall,
    the share of objects that are named; and how many mentions and words a description has."""
    return {
        "chair_s": ratio(sums["hallucinating"], sums["captions"]),
        "chair_i": ratio(sums["wrong"], sums["mentions"]),
        "recall": ratio(sums["found"], sums["objects"]),
        "mentions": ratio(sums["mentions"], sums["captions"]),
        "words": ratio(sums["words"], sums["captions"]),
    }
