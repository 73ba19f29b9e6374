"""Descriptions of pictures, scored by the objects that they name (Rohrbach et al. 2018, section 3.1)."""

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
    """An image (or its file) with its objects; `vocabulary` finds objects in a description."""

    image: Source
    objects: frozenset[str]
    vocabulary: Vocabulary
    question: str = "Please describe this image in detail."
    id: str | None = field(default=None, compare=False)

    @property
    def expected(self) -> list[str]:
        """The objects in the image."""
        return sorted(self.objects)

    def chats(self) -> list[Chat]:
        """Return the chat of the question; raise ValueError if the image's file does not decode."""
        return [chat([self.image], self.question)]


def tally(sample: Described, replies: Sequence[Reply]) -> dict[str, float]:
    """Return a description's contribution to the sums of `scores`; an object counts as often as it is mentioned."""
    (reply,) = replies
    mentioned = sample.vocabulary.mentioned(reply.text)
    wrong = [name for name in mentioned if name not in sample.objects]
    return {
        "captions": 1.0,
        "hallucinating": float(bool(wrong)),
        "mentions": float(len(mentioned)),
        "wrong": float(len(wrong)),
        "found": float(len(sample.objects & {*mentioned})),
        "objects": float(len(sample.objects)),
        "words": float(len(reply.text.split())),
    }


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return CHAIR_S, CHAIR_I, recall, and the mean number of mentions and words of a description.

    CHAIR_S is the share of descriptions that name an absent object; CHAIR_I is the share of mentions that do; recall is the
    share of objects that are named.
    """
    return {
        "chair_s": ratio(sums["hallucinating"], sums["captions"]),
        "chair_i": ratio(sums["wrong"], sums["mentions"]),
        "recall": ratio(sums["found"], sums["objects"]),
        "mentions": ratio(sums["mentions"], sums["captions"]),
        "words": ratio(sums["words"], sums["captions"]),
    }
