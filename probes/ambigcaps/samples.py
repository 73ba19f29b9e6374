"""Captions to translate, and the scoring of translations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from probes.answering.base import Chat, Reply
from probes.harness.bootstrap import Tallies
from probes.harness.pictures import Source, chat

Language = Literal["English", "Turkish"]
QUESTION = "Translate this caption of the picture from {source} into {target}. Answer with the translation alone."
ORDERS = 4
"""The longest n-grams that BLEU counts, in words."""


@dataclass(frozen=True)
class Translated:
    """A caption of an image (or its file), with its text in the other language."""

    image: Source
    source: Language
    text: str
    reference: str
    id: str | None = field(default=None, compare=False)

    @property
    def expected(self) -> str:
        """The right translation."""
        return self.reference

    @property
    def target(self) -> Language:
        """The other language."""
        return "Turkish" if self.source == "English" else "English"

    def chats(self) -> list[Chat]:
        """Return the chat of the question, its caption marked as the text context.

        Raises ValueError if the image's file does not decode.
        """
        (turn,) = chat([self.image], QUESTION.format(source=self.source, target=self.target) + "\n")
        return [[{**turn, "content": [*turn["content"], {"type": "text", "text": self.text, "span": "context"}]}]]


def check_bleu() -> None:
    """Raise ValueError if sacreBLEU is not installed, which comes with an extra."""
    if find_spec("sacrebleu") is None:
        raise ValueError("BLEU needs sacrebleu: pip install 'helmsight[eval]'")


@cache
def _bleu() -> Any:
    check_bleu()
    from sacrebleu.metrics import BLEU

    return BLEU(effective_order=True)


def tally(sample: Translated, replies: Sequence[Reply]) -> dict[str, float]:
    """Return a translation's contribution to the sums of BLEU: matching n-grams, all n-grams, and words."""
    (reply,) = replies
    score = _bleu().sentence_score(" ".join(reply.text.split()), [sample.reference])
    sums = {"words": score.sys_len, "reference": score.ref_len}
    sums |= {f"match {n}": count for n, count in enumerate(score.counts, 1)}
    sums |= {f"all {n}": count for n, count in enumerate(score.totals, 1)}
    return {name: float(value) for name, value in sums.items()}


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return corpus BLEU as sacreBLEU computes it by default, from 0 to 100."""
    names = [f"{prefix} {n}" for prefix in ("match", "all") for n in range(1, ORDERS + 1)]
    columns = np.stack([np.asarray(sums[name]) for name in (*names, "words", "reference")], axis=-1)
    rows = columns.reshape(-1, columns.shape[-1])
    values = [_score(row) for row in rows.astype(int).tolist()]
    return {"bleu": np.array(values).reshape(columns.shape[:-1])}


def _score(row: Sequence[int]) -> float:
    from sacrebleu.metrics import BLEU

    *counts, words, reference = row
    score: float = BLEU.compute_bleu(counts[:ORDERS], counts[ORDERS:], words, reference, smooth_method="exp").score
    return score
