"""A guard's effect on questions whose answers can be checked, against never and always applying its intervention.

Every question is asked twice, plainly and with the intervention. What a guard would have kept follows from both answers and
their numbers by the guard's own rule, so that all three policies are compared on the same answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probes.alarm.evaluate import MAX_TOKENS
from probes.alarm.samples import Checked
from probes.answering.base import Answerer, Question, Reply
from probes.answering.replies import replies
from probes.harness.bootstrap import paired, wilson
from probes.harness.comparison import Way, told_apart
from probes.harness.ledger import tell
from steering import Diagnose, NumberCondition
from steering.readouts.envelope import summary


@dataclass(frozen=True)
class GuardTries:
    """The two answers to every question: right with neither, `plain` and `changed`; (n,) bool each.

    `raised` and `still` tell whether the conditions hold for the plain answer and for the changed one.
    """

    plain: np.ndarray
    changed: np.ndarray
    raised: np.ndarray
    still: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """True where the guard keeps the changed answer."""
        return self.raised & ~self.still

    @property
    def guarded(self) -> np.ndarray:
        """True where the kept answer is right."""
        return np.where(self.kept, self.changed, self.plain)


def ask(
    answerer: Answerer,
    samples: Sequence[Checked],
    conditions: Sequence[NumberCondition],
    then: Way,
    every: bool,
    quiet: bool,
) -> GuardTries:
    """Ask every question plainly and with the interventions of `then`; with `every`, all conditions must hold."""
    diagnose = Diagnose(frozenset(condition.readout for condition in conditions))

    def questions() -> Iterator[Question]:
        for sample in samples:
            plain = Question(sample.chat(), max_tokens=MAX_TOKENS, diagnose=diagnose)
            yield plain
            push, interventions = told_apart(then)
            yield replace(plain, push=push, interventions=interventions)

    parts = [part for sample in samples for part in (sample.part, sample.part)]
    answers = list(replies(answerer, questions(), parts, title="Answers", quiet=quiet))
    plain, changed = answers[::2], answers[1::2]
    raised = [[_holds(conditions, every, reply) for reply in replies_of] for replies_of in (plain, changed)]
    right = [
        [sample.right(reply.text) for sample, reply in zip(samples, replies_of, strict=True)]
        for replies_of in (plain, changed)
    ]
    tell(answerer, _rows(samples, plain, changed, raised, right))
    return GuardTries(*(np.array(values, dtype=bool) for values in (*right, *raised)))


def _holds(conditions: Sequence[NumberCondition], every: bool, reply: Reply) -> bool:
    numbers = summary(reply.diagnostics) if reply.diagnostics else {}
    met = [condition.holds(numbers.get(condition.name)) for condition in conditions]
    return all(met) if every else any(met)


def _rows(
    samples: Sequence[Checked],
    plain: Sequence[Reply],
    changed: Sequence[Reply],
    raised: Sequence[Sequence[bool]],
    right: Sequence[Sequence[bool]],
) -> Iterator[dict[str, Any]]:
    for number, sample in enumerate(samples):
        yield {
            "part": sample.part, "sample": number, "id": sample.id, "questions": [sample.question],
            "expected": list(sample.accepted), "answers": [plain[number].text, changed[number].text],
            "raised": raised[0][number], "still": raised[1][number], "right": [right[0][number], right[1][number]],
        }  # fmt: skip


def evaluate(tries: GuardTries, seed: int = 0) -> dict[str, Any]:
    """Return the shares and accuracies with 95 % intervals.

    caught: of wrong plain answers, those for which the conditions hold; mended: those that the guard makes right. raised: of
    right answers, those for which they hold; broken: those that it makes wrong. Accuracies are those of the plain answers,
    of the changed ones, and of the guard's; `gain` is the guard's over either, paired. given_again: of all answers.
    """
    wrong, right = ~tries.plain, tries.plain
    return {
        "answers": len(tries.plain),
        "wrong": int(wrong.sum()),
        "caught": _share(wrong & tries.raised, wrong),
        "mended": _share(wrong & tries.kept & tries.changed, wrong),
        "raised": _share(right & tries.raised, right),
        "broken": _share(right & tries.kept & ~tries.changed, right),
        "given_again": _share(tries.raised, np.ones_like(wrong)),
        "kept": _share(tries.kept, np.ones_like(wrong)),
        "accuracy": {
            name: _share(values, np.ones_like(wrong))
            for name, values in (("never", tries.plain), ("always", tries.changed), ("guarded", tries.guarded))
        },
        "gain": {
            name: _difference(tries.guarded, other, seed)
            for name, other in (("never", tries.plain), ("always", tries.changed))
        },
    }


def _share(counted: np.ndarray, of: np.ndarray) -> Mapping[str, Any]:
    total = int(of.sum())
    if not total:
        return {"share": None, "share_95": None, "n": 0}
    share = int(counted.sum())
    return {"share": share / total, "share_95": list(wilson(share, total)), "n": total}


def _difference(first: np.ndarray, other: np.ndarray, seed: int) -> Mapping[str, Any]:
    differences = first.astype(float) - other.astype(float)
    return {"difference": float(differences.mean()), "difference_95": list(paired(differences, seed))}
