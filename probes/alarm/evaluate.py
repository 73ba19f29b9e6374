"""How well each number beside an answer tells wrong answers from right ones, and how well they do together.

One half of the answers, drawn at random, decides what is free: which way each number points, the weights of the logistic
combination, the threshold. All that is reported is of the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from probes.alarm.samples import Checked
from probes.answering.base import Answerer, Question, Reply
from probes.answering.replies import replies
from probes.harness.bootstrap import area, area_with_interval, wilson
from probes.harness.ledger import tell
from steering import Diagnose
from steering.model.alarm import Alarm
from steering.protocol.readout import REGISTRY
from steering.readouts.alarm import AlarmReadout, numbers_of
from steering.readouts.envelope import summary

NAMES = tuple(
    name for name, one in REGISTRY.items() if one.scalars and one.part_of is None and name != AlarmReadout.name
)
"""Every readout that has numbers for the journal."""

MAX_TOKENS = 40
FALSE_ALARMS = 0.05
"""The share of right answers on which the alarm may be raised where the threshold is chosen."""
RIDGE = 1e-2
"""The penalty on weights of standardised numbers, which keeps them finite where the two kinds can be parted wholly."""
FOLDS = 5
GAIN = 0.005
"""What a number must add to the area under the curve, in folds of the deciding half, for the alarm to go by it."""
LEAST = 10
"""Right answers and wrong ones that either half must have."""


@dataclass(frozen=True)
class Judged:
    """Answers: (n,) whether each is wrong, its part and what it is alike to; (n,) of every number, NaN where it is not
    defined."""

    wrong: np.ndarray
    part: np.ndarray
    alike: np.ndarray
    values: Mapping[str, np.ndarray]

    def of(self, chosen: np.ndarray) -> Judged:
        values = {name: one[chosen] for name, one in self.values.items()}
        return Judged(self.wrong[chosen], self.part[chosen], self.alike[chosen], values)


def ask(answerer: Answerer, samples: Sequence[Checked], *, seed: int = 0, quiet: bool = False) -> Judged:
    """Every question once, with all that is read beside it; `seed` says which half each is told to be in."""

    def questions() -> Iterator[Question]:
        for sample in samples:
            yield Question(sample.chat(), max_tokens=MAX_TOKENS, diagnose=Diagnose(frozenset(NAMES)))

    parts = [sample.part for sample in samples]
    said = list(replies(answerer, questions(), parts, title="Answers", quiet=quiet))
    rows = [numbers(reply) for reply in said]
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
    wrong = [not sample.right(reply.text) for sample, reply in zip(samples, said, strict=True)]
    known = {name: one for name, one in values.items() if np.isfinite(one).any() and len(np.unique(one)) > 1}
    tell(answerer, _told(samples, said, rows, wrong, seed))
    return Judged(np.array(wrong), np.array(parts), np.array([sample.alike for sample in samples]), known)


def _told(
    samples: Sequence[Checked],
    said: Sequence[Reply],
    rows: Sequence[Mapping[str, Any]],
    wrong: Sequence[bool],
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Of every question its part, number, name where it has one, what it is alike to, whether its half decides or is
    reported, the question, what is accepted, the answer, whether that is wrong, and the numbers read beside it."""
    deciding = set(split(len(samples), seed)[0].tolist())
    for number, (sample, reply, read, false) in enumerate(zip(samples, said, rows, wrong, strict=True)):
        yield {
            "part": sample.part, "sample": number, "id": sample.id, "alike": sample.alike,
            "half": "deciding" if number in deciding else "reported", "questions": [sample.question],
            "expected": list(sample.accepted), "answers": [reply.text], "wrong": false,
            "numbers": dict(read),
        }  # fmt: skip


def numbers(reply: Reply) -> dict[str, Any]:
    """What the journal would keep of an answer's readouts."""
    said = summary(reply.diagnostics) if reply.diagnostics else {}
    return {name: said.get(name) for name in numbers_of(NAMES)}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def split(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of so many answers decide, and which are reported."""
    fitted, tested = np.array_split(np.random.default_rng(seed).permutation(count), 2)
    return fitted, tested


def check_enough(count: int) -> None:
    """Raise ValueError where so many questions cannot have the right and wrong answers that are needed."""
    if count < 4 * LEAST:
        raise ValueError(
            f"{count} questions are too few: what tells wrong answers from right ones takes at least {LEAST} of either in "
            f"each half, which is {4 * LEAST} in all. Ask more (--limit)."
        )


def halves(judged: Judged, seed: int) -> tuple[Judged, Judged]:
    """The half that decides, and the one that is reported. Raises ValueError where either has too few of a kind."""
    fitted, tested = (judged.of(part) for part in split(len(judged.wrong), seed))
    for half in (fitted, tested):
        wrong = int(half.wrong.sum())
        if min(wrong, len(half.wrong) - wrong) < LEAST:
            raise ValueError(
                f"{int(judged.wrong.sum())} of {len(judged.wrong)} answers are wrong: what tells wrong answers from right "
                f"ones takes at least {LEAST} of either in each half. Ask more (--limit), or harder (--noise)."
            )
    return fitted, tested


def scores(alarm: Alarm, judged: Judged) -> np.ndarray:
    """(n,)"""
    columns = zip(*(judged.values[name].tolist() for name in alarm.numbers), strict=True)
    return np.array([alarm.score(dict(zip(alarm.numbers, row, strict=True))) for row in columns])


def fit(judged: Judged, among: Sequence[str] | None = None) -> Alarm | None:
    """The logistic regression of being wrong on every number, or those named, standardised, and the threshold that a share
    of FALSE_ALARMS of the right answers is above. None where there is no such number."""
    from statsmodels.genmod.families import Binomial  # noqa: PLC0415 -- takes a second
    from statsmodels.genmod.generalized_linear_model import GLM  # noqa: PLC0415

    names = [name for name, one in judged.values.items() if among is None or name in among]
    names = [name for name in names if np.nanstd(judged.values[name]) > 0]
    if not names:
        return None
    raw = np.stack([judged.values[name] for name in names], 1)
    centre, scale = np.nanmean(raw, 0), np.nanstd(raw, 0)
    columns = np.column_stack([np.ones(len(raw)), np.nan_to_num((raw - centre) / scale)])
    penalty = np.array([0.0, *[RIDGE] * len(names)])
    bias, *weights = (
        GLM(judged.wrong.astype(float), columns, Binomial()).fit_regularized(alpha=penalty, L1_wt=0.0).params
    )
    parts = zip(names, centre, scale, weights, strict=True)
    numbers = {name: {"centre": float(c), "scale": float(s), "weight": float(w)} for name, c, s, w in parts}
    fitted = Alarm(numbers, float(bias), 0.0, len(judged.wrong), {})
    right = scores(fitted, judged)[~judged.wrong]
    return replace(fitted, threshold=float(np.quantile(right, 1 - FALSE_ALARMS)))


def select(judged: Judged, among: Sequence[str], seed: int = 0) -> list[str]:
    """Of these numbers those by which, one after the other, the area under the curve rises most where the sum is fitted on
    four fifths of the answers and tried on the fifth, as long as it rises by GAIN: a number that tells right answers only by
    what kind of question they are to would cost more than it tells."""
    left = [name for name in among if name in judged.values]
    folds = np.array_split(np.random.default_rng(seed).permutation(len(judged.wrong)), FOLDS)
    parts = [(judged.of(np.setdiff1d(np.arange(len(judged.wrong)), fold)), judged.of(fold)) for fold in folds]
    chosen: list[str] = []
    best = 0.5
    while left:
        areas = {name: float(np.mean([_tried(*part, [*chosen, name]) for part in parts])) for name in left}
        name = max(areas, key=lambda one: areas[one])
        if areas[name] < best + GAIN:
            break
        best = areas[name]
        chosen.append(name)
        left.remove(name)
    return chosen


def _tried(fitted: Judged, other: Judged, names: Sequence[str]) -> float:
    found = fit(fitted, names)
    return (
        0.5 if found is None or other.wrong.all() or not other.wrong.any() else area(scores(found, other), other.wrong)
    )


def evaluate(judged: Judged, *, among: Sequence[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """By part and of all: AUROC of every number, of all of them combined and of the alarm, among all answers and among alike
    ones, and how often the alarm is raised. among: the numbers that the alarm may go by, which are those that its readout
    reads. Raises ValueError where there are too few right or wrong answers."""
    fitted, tested = halves(judged, seed)
    combined = fit(fitted)
    alarm = fit(fitted, select(fitted, numbers_of() if among is None else among, seed))
    signs = {name: _sign(fitted, one) for name, one in fitted.values.items()}
    parts = ["all", *dict.fromkeys(judged.part)]
    report: dict[str, Any] = {}
    for part in parts:
        half = tested.of(np.flatnonzero((tested.part == part) | (part == "all")))
        wrong = int(half.wrong.sum())
        report[part] = {"answers": len(half.wrong), "wrong": wrong}
        if min(wrong, len(half.wrong) - wrong) < LEAST:
            continue
        scored = {name: signs[name] * half.values[name] for name in signs}
        scored |= {name: scores(one, half) for name, one in (("combination", combined), ("alarm", alarm)) if one}
        report[part]["auroc"] = {name: _areas(half, one) for name, one in scored.items()}
        report[part]["alarm"] = alarm and _raised(half, alarm)
    return {
        "parts": report, "signs": signs, "combination": combined and asdict(combined),
        "alarm": alarm and asdict(replace(alarm, raised=_rates(report["all"]))),
    }  # fmt: skip


def _rates(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's calibration says of its alarm."""
    told = {"right": (found["alarm"], "false_alarms"), "wrong": (found["alarm"], "caught")}
    told |= {"area": (found["auroc"]["alarm"], "auroc"), "alike": (found["auroc"]["alarm"], "alike")}
    return {name: None if one[key] is None else [one[key], *one[f"{key}_95"]] for name, (one, key) in told.items()}


def _sign(fitted: Judged, values: np.ndarray) -> int:
    """Whether wrong answers have the greater values, 1, or the smaller ones, -1."""
    known = np.isfinite(values)
    return -1 if area(values[known], fitted.wrong[known]) < 0.5 else 1


def _areas(half: Judged, values: np.ndarray) -> dict[str, Any]:
    """Of the answers that have the number: `auroc` with its interval, `alike` with its own, among answers that are alike."""
    known = np.flatnonzero(np.isfinite(values))
    values, wrong, alike = values[known], half.wrong[known], half.alike[known]
    found: dict[str, Any] = {"n": len(known)}
    for name, strata in (("auroc", None), ("alike", alike)):
        one = area_with_interval(values, wrong, strata)
        found |= {name: one and one[0], f"{name}_95": one and list(one[1])}
    return found


def _raised(half: Judged, alarm: Alarm) -> dict[str, Any]:
    """On which share of the right and of the wrong answers the alarm is raised, and how many of those that raise it are
    wrong, each with Wilson's interval."""
    raised = scores(alarm, half) > alarm.threshold
    shares = {
        "false_alarms": (raised & ~half.wrong, ~half.wrong),
        "caught": (raised & half.wrong, half.wrong),
        "precision": (raised & half.wrong, raised),
    }
    found: dict[str, Any] = {}
    for name, (counted, of) in shares.items():
        total = int(of.sum())
        found[name] = None if not total else float(counted.sum() / total)
        found[f"{name}_95"] = None if not total else list(wilson(float(counted.sum()), total))
    return found
