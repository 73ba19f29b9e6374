"""The questions of SAGE's benchmark besides POPE's: the differences between two pictures."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from probes.answering.base import Chat
from probes.harness.pictures import chat
from probes.image_pairs.metrics import Claim
from probes.image_pairs.questions import DIFFERENT, EXPLAINED_DIFFERENT, EXPLAINED_SAME, SAME, WHAT

QUESTIONS = (WHAT, SAME, DIFFERENT, EXPLAINED_SAME, EXPLAINED_DIFFERENT)
"""The questions about a pair."""


@dataclass(frozen=True)
class Difference:
    """Two pictures with their differences: any number, or none."""

    first: Image.Image
    second: Image.Image
    true: tuple[Claim, ...]

    @property
    def setting(self) -> str:
        return ("none", "single")[len(self.true)] if len(self.true) < 2 else "several"

    def chats(self) -> list[Chat]:
        """Return the chats of `QUESTIONS`, in that order."""
        return [chat([self.first, self.second], text) for text in QUESTIONS]
