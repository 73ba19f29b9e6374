"""The power of each number beside an answer, and of their combination, to separate wrong answers from right ones.

One half of the answers, drawn at random, fits the free parameters: the sign of each number, the weights of the logistic
combination, the threshold. All results are reported on the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from probes.alarm.samples import Checked
from probes.answering.base import Answerer, Question, Reply
from probes.answering.replies import replies
from probes.harness.bootstrap import area, area_with_interval, ranked, wilson
from probes.harness.ledger import tell
from steering import Diagnose
from steering.model.alarm import Alarm
from steering.protocol.readout import REGISTRY
from steering.readouts.alarm import AlarmReadout, numbers_of
from steering.readouts.envelope import summary

NAMES = tuple(
    name
    for name, readout in REGISTRY.items()
    if readout.scalars and readout.part_of is None and name != AlarmReadout.name
)
"""The readouts that have numbers for the journal."""

MAX_TOKENS = 40
FALSE_ALARMS = 0.05
"""The share of right answers that may raise the alarm, on which the threshold is chosen."""
RIDGE = 1e-2
"""The penalty on weights of standardised numbers, which keeps them finite if the two kinds are fully separable."""
FOLDS = 5
GAIN = 0.005
"""The least gain in the area under the curve, in folds of the fitting half, for the alarm to use a number."""
LEAST = 10
"""The least number of right answers, and of wrong ones, in either half."""


@dataclass(frozen=True)
class Judged:
    """Answers with their numbers, all (n,).

    `wrong` is True for a wrong answer, `part` its part, `alike` the stratum of comparable answers; `values` holds every
    number by name, NaN where it is undefined.
    """

    wrong: np.ndarray
    part: np.ndarray
    alike: np.ndarray
    values: Mapping[str, np.ndarray]

    def of(self, chosen: np.ndarray) -> Judged:
        values = {name: column[chosen] for name, column in self.values.items()}
        return Judged(self.wrong[chosen], self.part[chosen], self.alike[chosen], values)


def ask(answerer: Answerer, samples: Sequence[Checked], *, seed: int = 0, quiet: bool = False) -> Judged:
    """Ask every question once, with all readouts beside it; `seed` determines the halves that are recorded."""

    def questions() -> Iterator[Question]:
        for sample in samples:
            yield Question(sample.chat(), max_tokens=MAX_TOKENS, diagnose=Diagnose(frozenset(NAMES)))

    parts = [sample.part for sample in samples]
    answers = list(replies(answerer, questions(), parts, title="Answers", quiet=quiet))
    rows = [numbers(reply) for reply in answers]
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: np.array([_number(row.get(name)) for row in rows]) for name in names}
    wrong = [not sample.right(reply.text) for sample, reply in zip(samples, answers, strict=True)]
    varying = {
        name: column for name, column in values.items() if np.isfinite(column).any() and len(np.unique(column)) > 1
    }
    tell(answerer, _answer_rows(samples, answers, rows, wrong, seed))
    return Judged(np.array(wrong), np.array(parts), np.array([sample.alike for sample in samples]), varying)


def _answer_rows(
    samples: Sequence[Checked],
    answers: Sequence[Reply],
    rows: Sequence[Mapping[str, Any]],
    wrong: Sequence[bool],
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yield a row for every question.

    It holds its part, number, name if it has one, stratum, half (deciding or reported), question, accepted answers, answer,
    whether that is wrong, and the numbers read beside it.
    """
    deciding = set(split(len(samples), seed)[0].tolist())
    for number, (sample, reply, read, false) in enumerate(zip(samples, answers, rows, wrong, strict=True)):
        yield {
            "part": sample.part, "sample": number, "id": sample.id, "alike": sample.alike,
            "half": "deciding" if number in deciding else "reported", "questions": [sample.question],
            "expected": list(sample.accepted), "answers": [reply.text], "wrong": false,
            "numbers": dict(read),
        }  # fmt: skip


def numbers(reply: Reply) -> dict[str, Any]:
    """Return the numbers that the journal would keep of an answer's readouts."""
    values = summary(reply.diagnostics) if reply.diagnostics else {}
    return {name: values.get(name) for name in numbers_of(NAMES)}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def split(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the deciding answers, and of the reported ones."""
    fitted, tested = np.array_split(np.random.default_rng(seed).permutation(count), 2)
    return fitted, tested


def check_enough(count: int) -> None:
    """Raise ValueError if there are too few questions for the right and wrong answers that are needed."""
    if count < 4 * LEAST:
        raise ValueError(
            f"{count} questions are too few: each half needs at least {LEAST} right and {LEAST} wrong answers, "
            f"{4 * LEAST} in all. Ask more (--limit)."
        )


def halves(judged: Judged, seed: int) -> tuple[Judged, Judged]:
    """Return the deciding half and the reported one; raise ValueError if either has too few right or wrong answers."""
    fitted, tested = (judged.of(part) for part in split(len(judged.wrong), seed))
    for half in (fitted, tested):
        wrong = int(half.wrong.sum())
        if min(wrong, len(half.wrong) - wrong) < LEAST:
            raise ValueError(
                f"{int(judged.wrong.sum())} of {len(judged.wrong)} answers are wrong: each half needs at least {LEAST} "
                f"right and {LEAST} wrong answers. Ask more (--limit), or harder ones (--noise)."
            )
    return fitted, tested


def scores(alarm: Alarm, judged: Judged) -> np.ndarray:
    """Return the alarm's score of each answer (n,)."""
    columns = zip(*(judged.values[name].tolist() for name in alarm.numbers), strict=True)
    return np.array([alarm.score(dict(zip(alarm.numbers, row, strict=True))) for row in columns])


def fit(judged: Judged, among: Sequence[str] | None = None) -> Alarm | None:
    """Fit the logistic regression of being wrong on every number, or on those named, standardised.

    The threshold is the score exceeded by a share of FALSE_ALARMS of the right answers. None if there is no such number.
    """
    from statsmodels.genmod.families import Binomial  # noqa: PLC0415 -- takes a second
    from statsmodels.genmod.generalized_linear_model import GLM  # noqa: PLC0415

    names = [name for name in judged.values if among is None or name in among]
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
    """Select numbers greedily, by their gain in area under the curve, until it is below GAIN.

    The sum is fitted on four fifths of the answers and tested on the fifth. A number that only tells what kind of question
    is asked would cost more than it gains.
    """
    candidates = [name for name in among if name in judged.values]
    folds = np.array_split(np.random.default_rng(seed).permutation(len(judged.wrong)), FOLDS)
    parts = [(judged.of(np.setdiff1d(np.arange(len(judged.wrong)), fold)), judged.of(fold)) for fold in folds]
    chosen: list[str] = []
    best = 0.5
    while candidates:
        areas = {name: float(np.mean([_tried(*part, [*chosen, name]) for part in parts])) for name in candidates}
        name = max(areas, key=lambda candidate: areas[candidate])
        if areas[name] < best + GAIN:
            break
        best = areas[name]
        chosen.append(name)
        candidates.remove(name)
    return chosen


def _tried(fitted: Judged, other: Judged, names: Sequence[str]) -> float:
    alarm = fit(fitted, names)
    return (
        0.5 if alarm is None or other.wrong.all() or not other.wrong.any() else area(scores(alarm, other), other.wrong)
    )


def evaluate(judged: Judged, *, among: Sequence[str] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return, by part and for all, the AUROC of every number, of their combination and of the alarm, and the alarm's rates.

    AUROC is among all answers and among alike ones. among: the numbers that the alarm may use, by default those that its
    readout reads. Raises ValueError if there are too few right or wrong answers.
    """
    fitted, tested = halves(judged, seed)
    combined = fit(fitted)
    alarm = fit(fitted, select(fitted, numbers_of() if among is None else among, seed))
    signs = {name: _sign(fitted, column) for name, column in fitted.values.items()}
    parts = ["all", *dict.fromkeys(judged.part)]
    report: dict[str, Any] = {}
    for part in parts:
        half = tested.of(np.flatnonzero((tested.part == part) | (part == "all")))
        wrong = int(half.wrong.sum())
        report[part] = {"answers": len(half.wrong), "wrong": wrong}
        if min(wrong, len(half.wrong) - wrong) < LEAST:
            continue
        scored = {name: signs[name] * half.values[name] for name in signs}
        scored |= {
            name: scores(scorer, half) for name, scorer in (("combination", combined), ("alarm", alarm)) if scorer
        }
        report[part]["auroc"] = {name: _areas(half, column) for name, column in scored.items()}
        report[part]["alarm"] = alarm and _raised(half, alarm)
    return {
        "parts": report, "signs": signs, "combination": combined and asdict(combined),
        "alarm": alarm and asdict(replace(alarm, raised=_rates(report["all"]))),
    }  # fmt: skip


def measure(alarm: Alarm, half: Judged) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the areas and rates of an alarm on answers, and the rates as a model's calibration stores them."""
    wrong = int(half.wrong.sum())
    areas = _areas(half, scores(alarm, half))
    report = {"answers": len(half.wrong), "wrong": wrong, "auroc": areas, "alarm": _raised(half, alarm)}
    return report, _rates({**report, "auroc": {"alarm": report["auroc"]}})


def _rates(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rates of the alarm as a model's calibration stores them."""
    sources = {"right": (report["alarm"], "false_alarms"), "wrong": (report["alarm"], "caught")}
    sources |= {"area": (report["auroc"]["alarm"], "auroc"), "alike": (report["auroc"]["alarm"], "alike")}
    return {
        name: None if group[key] is None else [group[key], *group[f"{key}_95"]]
        for name, (group, key) in sources.items()
    }


def _sign(fitted: Judged, values: np.ndarray) -> int:
    """Return 1 if wrong answers have the greater values, -1 if they have the smaller ones."""
    finite = np.isfinite(values)
    return -1 if area(values[finite], fitted.wrong[finite]) < 0.5 else 1


def _areas(half: Judged, values: np.ndarray) -> dict[str, Any]:
    """Return `auroc` of the answers that have the number, and `alike`, that among alike answers, each with its interval.

    `best_accuracy` is that of telling wrong answers by the number, at the threshold that makes it greatest.
    """
    finite = np.flatnonzero(np.isfinite(values))
    values, wrong, alike = values[finite], half.wrong[finite], half.alike[finite]
    areas: dict[str, Any] = {"n": len(finite)}
    for name, strata in (("auroc", None), ("alike", alike)):
        measured = area_with_interval(values, wrong, strata)
        areas |= {name: measured and measured[0], f"{name}_95": measured and list(measured[1])}
    best = ranked(values.tolist(), wrong.tolist(), range(len(finite)))["best_accuracy"]
    return areas | {"best_accuracy": best["value"], "best_accuracy_95": best["value_95"]}


def _raised(half: Judged, alarm: Alarm) -> dict[str, Any]:
    """Return the alarm's rates, each with Wilson's interval.

    They are the shares of right and of wrong answers that raise it, and the share of wrong ones among those.
    """
    raised = scores(alarm, half) > alarm.threshold
    shares = {
        "false_alarms": (raised & ~half.wrong, ~half.wrong),
        "caught": (raised & half.wrong, half.wrong),
        "precision": (raised & half.wrong, raised),
    }
    rates: dict[str, Any] = {}
    for name, (counted, of) in shares.items():
        total = int(of.sum())
        rates[name] = None if not total else float(counted.sum() / total)
        rates[f"{name}_95"] = None if not total else list(wilson(float(counted.sum()), total))
    return rates
