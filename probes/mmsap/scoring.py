"""The scoring of MM-SAP (sections 4.1 and 4.4), as shares: the paper's scores are these times 100.

Among the questions of a part, or of all: kk is answered rightly (equation 1), ku rightly refused (2): always in BeyondVisQA,
never in BasicVisQA, and in KnowVisQA if the model without the refusal among the options is also wrong (3); sa is their sum
(4). answer_accuracy is right among those not refused (5), answer_rate not refused (6). unknown_knowns is known, among those
of KnowVisQA that are refused: equation 8 as printed divides by all of its questions, table 4 by the refused ones.

An answer that chooses no option is wrong and not refused; `unread` is their share. knowledge, which is not in the paper, is
right without the refusal as an option.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from probes.answering.base import Reply
from probes.answering.letters import letter
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.mmsap.samples import SapSample, questions_per_run
from steering.interventions.refusal import REFUSAL

Verdict = Literal["right", "wrong", "refused", "unread"]

SHARES = {
    "kk": Share("right", "asked", fixed=False),
    "ku": Share("rightly", "asked", fixed=False),
    "sa": Share("aware", "asked", fixed=False),
    "answer_rate": Share("answered", "asked", fixed=False),
    "answer_accuracy": Share("right", "answered", fixed=False),
    "unknown_knowns": Share("known", "doubted", fixed=False),
    "knowledge": Share("forced_right", "forced", fixed=False),
    "unread": Share("unread", "asked", fixed=False),
}
"""The metrics, each a share of questions, asked once per run."""

_REFUSES = re.compile(r"\bsorry\b|\bcan(?:no|')t (?:help|answer|tell|determine|say)\b|\bdo(?:n't| not) know\b")


def verdict(answer: str, options: Sequence[str], right: str | None) -> Verdict:
    """Return the verdict on an answer to a question with these options; one that names none may still refuse in words."""
    chosen = letter(answer, options)
    if chosen is None:
        return "refused" if _REFUSES.search(answer.lower().replace("\u2019", "'")) else "unread"
    option = options[ord(chosen) - ord("A")]
    return "refused" if option == REFUSAL else "right" if option == right else "wrong"


def tallies(sample: SapSample, replies: Sequence[Reply], seed: int) -> list[dict[str, float]]:
    """Return what the replies to `sample.chats` add, run by run, to the sums from which `scores` computes metrics."""
    per_run = questions_per_run(sample.part)
    return [
        _run(sample, [reply.text for reply in replies[i : i + per_run]], i // per_run, seed)
        for i in range(0, len(replies), per_run)
    ]


def tally(sample: SapSample, replies: Sequence[Reply], seed: int) -> dict[str, float]:
    """Return the tally of all runs together."""
    runs = tallies(sample, replies, seed)
    return {name: sum(run[name] for run in runs) for name in runs[0]}


def _run(sample: SapSample, answers: Sequence[str], run: int, seed: int) -> dict[str, float]:
    offered = sample.offered(run, seed)
    verdicts = [verdict(answer, options, sample.answer) for answer, options in zip(answers, offered, strict=True)]
    right, refused = verdicts[0] == "right", verdicts[0] == "refused"
    forced = len(verdicts) == 2
    knows = forced and verdicts[1] == "right"
    rightly = refused and (sample.part == "beyond" or (forced and not knows))
    sums = {
        "asked": True,
        "right": right,
        "rightly": rightly,
        "aware": right or rightly,
        "answered": not refused,
        "doubted": forced and refused,
        "known": knows and refused,
        "forced": forced,
        "forced_right": knows,
        "unread": verdicts[0] == "unread",
    }
    return {name: float(value) for name, value in sums.items()}


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the metrics of summed tallies, NaN where a metric is undefined."""
    return {name: ratio(sums[share.counted], sums[share.of]) for name, share in SHARES.items()}
