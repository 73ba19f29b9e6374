"""The benchmark's evaluation: every condition asks about the same pairs, and is compared with the plain answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from probes.answering.base import Answerer, Chat, Reply
from probes.answering.progress import Tracker
from probes.answering.talks import hold
from probes.harness.comparison import BASELINE, PartAnswered, SampleSet, measured
from probes.harness.ledger import asked_text, tell
from probes.spd.asking import SEVERAL, SINGLE, Manner, Part, Presentation, most, talk
from probes.spd.judging.rules import Statement
from probes.spd.samples import PicturePair
from probes.spd.scoring import (
    SEVERAL_SHARES,
    SINGLE_SHARES,
    Verdict,
    several_scores,
    several_tally,
    single_scores,
    single_tally,
)
from steering import RequestError

log = logging.getLogger(__name__)

Answered = dict[Part, dict[str, PartAnswered[PicturePair]]]
"""Answers by set and condition."""
Judge = Callable[[Sequence[Statement]], Sequence[Verdict]]


def answer(
    answerer: Answerer,
    manners: Mapping[str, Manner],
    pairs: Sequence[PicturePair],
    form: Presentation,
    judge: Judge,
    quiet: bool = False,
) -> Answered:
    """Return the answers of every condition to its sets of pairs.

    Conditions that the model or its pictures refuse are left out.
    """
    parts: dict[Part, Sequence[PicturePair]] = {
        "single": [pair for pair in pairs if pair.difficulty is not None],
        "several": [pair for pair in pairs if pair.difficulty is None],
    }
    pairs_by_manner = {
        name: {part: parts[part] for part in manner.parts if parts[part]} for name, manner in manners.items()
    }
    totals = {
        name: sum(most(part, manners[name]) * len(chosen) for part, chosen in parts_of_manner.items())
        for name, parts_of_manner in pairs_by_manner.items()
        if parts_of_manner
    }
    answered: Answered = {"single": {}, "several": {}}
    with Tracker("Conditions", totals, quiet=quiet) as progress:
        for name in totals:

            def heard(reply: Reply, name: str = name) -> None:
                progress.advance(name, kept=reply.kept)

            try:
                for part, chosen in pairs_by_manner[name].items():
                    talks = (talk(pair, part, manners[name], form) for pair in chosen)
                    replies = hold(answerer, talks, heard)
                    scored = sample_set(part, chosen, manners[name], form, replies, judge)
                    tallies = [scored.tally(*answers_of_pair) for answers_of_pair in zip(chosen, replies, strict=True)]
                    part_answered = answered[part][name] = PartAnswered(scored, replies, tallies)
                    tell(
                        answerer,
                        part_answered.rows(
                            name, [[asked_text(chat) for chat in scored.chats(pair)] for pair in chosen]
                        ),
                    )
            except RequestError as error:
                if name == BASELINE:
                    raise
                log.warning("%s is left out: %s", name, error)
            progress.leave_out(name)
    return answered


def evaluated(answered: Answered) -> dict[str, Any]:
    """Return the metrics by condition, of "single" and "several" if it asks about that set, as `compare` returns them."""
    scores_by_condition: dict[str, Any] = {}
    for part_answers in answered.values():
        for name, scores in (
            measured({name: [answers_of_part] for name, answers_of_part in part_answers.items()}).items()
            if part_answers
            else ()
        ):
            scores_by_condition[name] = scores_by_condition.get(name, {}) | scores
    return scores_by_condition


def sample_set(
    part: Part,
    pairs: Sequence[PicturePair],
    manner: Manner,
    form: Presentation,
    replies: Sequence[Sequence[Reply]],
    judge: Judge,
) -> SampleSet[PicturePair]:
    """Return the pairs of a set, with the first questions about each, and the scoring of these replies.

    The judge is asked about all replies at once.
    """

    def chats(pair: PicturePair) -> Sequence[Chat]:
        return [question.chat for question in next(talk(pair, part, manner, form))]

    def tally_single(pair: PicturePair, about: Sequence[Reply]) -> Mapping[str, float]:
        return single_tally(pair, [reply.text for reply in about])

    if part == "single":
        return SampleSet(
            part, pairs, chats, tally_single, single_scores, SINGLE_SHARES, setting=_setting, each=len(SINGLE)
        )
    statements = [
        Statement(pair, *(reply.text for reply in about[-3:])) for pair, about in zip(pairs, replies, strict=True)
    ]
    verdicts = dict(zip((pair.id for pair in pairs), judge(statements), strict=True))

    def tally(pair: PicturePair, about: Sequence[Reply]) -> Mapping[str, float]:
        return several_tally(pair, [reply.text for reply in about], verdicts[pair.id], form.categories)

    return SampleSet(part, pairs, chats, tally, several_scores, SEVERAL_SHARES, setting=_setting, each=len(SEVERAL) + 1)


def _setting(pair: PicturePair) -> str:
    return pair.setting
