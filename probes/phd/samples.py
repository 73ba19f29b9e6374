"""Yes/no questions beside a text (Liu et al. 2024): plain, inaccurate (iac) or incorrect (icc)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from probes.answering.base import Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.comparison import SampleSet
from probes.image_pairs.claims import yes
from probes.image_qa import yes_no
from probes.image_qa.yes_no import YesNo

Mode = Literal["base", "iac", "icc"]
MODES: tuple[Mode, ...] = get_args(Mode)

SHARES = yes_no.SHARES | {"recall_no": Share("denied", "absent")}


@dataclass(frozen=True)
class PhdSample(YesNo):
    """A question that already includes the text; its `setting` is the task."""

    mode: Mode


def tally(sample: PhdSample, replies: Sequence[Reply]) -> dict[str, float]:
    """Return the tally of any yes/no question, and whether "no" was said rightly."""
    absent = not sample.present
    denied = absent and yes(replies[0].text) is False
    return yes_no.tally(sample, replies) | {"absent": float(absent), "denied": float(denied)}


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the scores of any yes/no question, the recall of no, and the PhD index: the harmonic mean of both recalls."""
    scores_yes_no = yes_no.scores(sums)
    no = ratio(sums["denied"], sums["absent"])
    return scores_yes_no | {
        "recall_no": no,
        "index": ratio(2 * scores_yes_no["recall"] * no, scores_yes_no["recall"] + no),
    }


def parts(samples: Sequence[PhdSample]) -> list[SampleSet[PhdSample]]:
    """Return a part for each mode, scored by task."""
    return [
        SampleSet(
            f"PhD-{mode}", [sample for sample in samples if sample.mode == mode], PhdSample.chats, tally, scores, SHARES,
            setting=lambda sample: sample.setting, cluster=yes_no.shown, truths=yes_no.truths,
        )
        for mode in MODES
    ]  # fmt: skip
