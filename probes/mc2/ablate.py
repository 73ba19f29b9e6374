"""The ablations of the modality-preference paper's appendix E: probe size, one task only, strength, and latency."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from probes.answering.base import Answerer
from probes.answering.progress import tracked
from probes.answering.requests import request
from probes.conflicts.asking import Condition, ask
from probes.conflicts.samples import SIDES, ConflictSample, Side, messages
from probes.conflicts.shares import Outcome, Shares
from probes.harness.bootstrap import interval, paired
from probes.mc2 import memory
from probes.mc2.evaluate import Candidate
from probes.vector.build import Recipe, build, grow
from steering import Engine, Sampling, Steer, SteeringVector

SIZES = (25, 50, 75, 100, 125, 150, 175, 200, 225, 250)
STRENGTHS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0)
"""The strengths of the paper's Table 10, behind 0 for no steering, in published units."""

CLOSE = 0.05
"""The difference of shares below which they are practically equal."""


@dataclass(frozen=True)
class Steered:
    """A setting steered toward either side.

    beside: by side, the difference of its share to that in the last setting of the same ablation, with its paired 95 %
    interval.
    """

    shares: Mapping[Side, Shares]
    beside: Mapping[Side, tuple[float, tuple[float, float]]] = field(default_factory=dict)

    @property
    def effect(self) -> float:
        """The separation of the two directions: the mean over the sides of the share that follows the side, 0 to 1."""
        return sum(self.shares[side].toward(side) for side in SIDES) / 2

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {side: shares.to_json() for side, shares in self.shares.items()}
        for side, (difference, bounds) in self.beside.items():
            result[side] |= {"difference": difference, "difference_95": list(bounds)}
        return result


def by_samples(
    engine: Engine,
    answerer: Answerer,
    probe: Sequence[ConflictSample],
    samples: Sequence[ConflictSample],
    steering: Candidate,
    sizes: Sequence[int] = SIZES,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> dict[int, Steered]:
    """Return Table 8: vectors from each number of probe samples, at the layers and strength of the evaluated vector."""
    recipe = Recipe.of(steering.vector)
    vectors = grow(engine, probe, [size for size in sizes if size <= len(probe)], recipe=recipe, seed=seed, quiet=quiet)
    return dict(
        zip(
            sizes,
            _rows(answerer, samples, [_with_vector(steering, vector) for vector in vectors], "Probe sizes", quiet),
            strict=False,
        )
    )


def by_tasks(
    engine: Engine,
    answerer: Answerer,
    probe: Sequence[ConflictSample],
    samples: Sequence[ConflictSample],
    steering: Candidate,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> dict[str, Steered]:
    """Return Table 9: vectors from the probe samples of one task each, steering all tasks; the last row is of all."""
    tasks = sorted({sample.task for sample in probe})
    parts = {task: [sample for sample in probe if sample.task == task] for task in tasks}
    recipe = Recipe.of(steering.vector)
    vectors = [build(engine, part, recipe=recipe, seed=seed, quiet=quiet) for part in (*parts.values(), probe)]
    return dict(
        zip(
            [*tasks, "all tasks"],
            _rows(answerer, samples, [_with_vector(steering, vector) for vector in vectors], "Tasks", quiet),
            strict=True,
        )
    )


def by_strength(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    steering: Candidate,
    strengths: Sequence[float] = STRENGTHS,
    *,
    quiet: bool = False,
) -> dict[float, Steered]:
    """Return Table 10 by strength in published units, whatever strength is evaluated.

    If the vector's published weight is unknown, strengths are in its own units.
    """
    tried = [replace(steering, strength=strength / (steering.vector.published or 1.0)) for strength in strengths]
    return dict(zip(strengths, _rows(answerer, samples, tried, "Strengths", quiet), strict=True))


def _with_vector(steering: Candidate, vector: SteeringVector) -> Candidate:
    """Return the same steering with another vector, with the same factor on its published weights."""
    factor = steering.vector.published or 1.0
    layers = steering.layers or steering.vector.layers
    return replace(steering, vector=vector * factor, layers=layers)


def _rows(
    answerer: Answerer,
    samples: Sequence[ConflictSample],
    tried: Sequence[Candidate],
    title: str,
    quiet: bool,
) -> list[Steered]:
    conditions = [Condition("plain", row.toward(side)) for row in tried for side in SIDES]
    answers = iter(ask(answerer, samples, conditions, title=title, quiet=quiet))
    outcomes = [{side: next(answers).outcomes for side in SIDES} for _ in tried]
    return [
        Steered(
            {side: Shares.of(outcomes_of_row[side], intervals=True) for side in SIDES},
            {side: _compare(outcomes_of_row[side], outcomes[-1][side], side) for side in SIDES},
        )
        for outcomes_of_row in outcomes
    ]


def _compare(first: Sequence[Outcome], second: Sequence[Outcome], side: Side) -> tuple[float, tuple[float, float]]:
    """Return the difference of the shares that follow the side, first less second, and its paired interval."""
    follows, followed = (np.array([outcome == side for outcome in outcomes], float) for outcomes in (first, second))
    difference = follows - followed
    return float(difference.mean()), paired(difference)


@dataclass(frozen=True)
class Knee:
    """The bend of a strength curve.

    `strength` is the least with an effect within CLOSE of the greatest. The slopes are the effect added per unit of strength
    before it, and after it up to the greatest strength (None at that one). `breaks_at` is the first strength beyond it, if
    any, with an effect that has fallen by CLOSE again.
    """

    strength: float
    slope_before: float
    slope_after: float | None
    breaks_at: float | None

    @property
    def visible(self) -> bool:
        """True if the curve rises to the knee at least five times as fast as beyond it, or breaks later."""
        if self.slope_after is None:  # it may still rise
            return False
        return self.slope_before > 0 and (self.slope_before > 5 * abs(self.slope_after) or self.breaks_at is not None)

    def to_json(self) -> dict[str, Any]:
        return {
            "strength": self.strength, "slope_before": self.slope_before, "slope_after": self.slope_after,
            "breaks_at": self.breaks_at, "visible": self.visible,
        }  # fmt: skip


def knee(rows: Mapping[float, Steered]) -> Knee:
    """Return the knee of the curve of effects over strengths, which should begin at 0."""
    strengths = sorted(rows)
    effects = [rows[strength].effect for strength in strengths]
    at = next(i for i, effect in enumerate(effects) if effect >= max(effects) - CLOSE)
    before = (effects[at] - effects[0]) / (strengths[at] - strengths[0]) if at else 0.0
    after = (effects[-1] - effects[at]) / (strengths[-1] - strengths[at]) if at + 1 < len(effects) else None
    peak = effects.index(max(effects))
    breaks = next((s for s, e in zip(strengths[peak:], effects[peak:], strict=True) if e < max(effects) - CLOSE), None)
    return Knee(strengths[at], before, after, breaks)


@dataclass(frozen=True)
class Latency:
    """Seconds and memory of one answer alone, and their ratios to the plain answer's.

    The seconds are a median over samples, their ratio a median of the ratios of the same sample, with the 95 % bootstrap
    interval. The peak memory, model included, is a median (see `memory`), with a ratio likewise, if known.
    """

    seconds: float
    ratio: float
    interval: tuple[float, float]
    megabytes: float | None = None
    memory: tuple[float, tuple[float, float]] | None = None

    def to_json(self) -> dict[str, Any]:
        ratio, bounds = self.memory or (None, None)
        return {
            "seconds": self.seconds, "ratio": self.ratio, "ratio_95": list(self.interval), "megabytes": self.megabytes,
            "memory_ratio": ratio, "memory_ratio_95": bounds and list(bounds),
        }  # fmt: skip


def latency(
    engine: Engine, samples: Sequence[ConflictSample], steering: Candidate, *, quiet: bool = False
) -> dict[str, Latency]:
    """Return Table 11: one request at a time, plain, reading the states (as a probe does) and steered, in turn.

    An answer is 8 tokens long in all three. Images are encoded before, so that no request benefits from another's cache.
    """
    steers = (Steer.to(steering.vector, "text", steering.strength, layers=steering.layers),)
    sampling = Sampling(max_tokens=8, ignore_eos=True)
    device = engine.mllm.device
    seconds: dict[str, list[float]] = {"plain": [], "probing": [], "steering": []}
    peaks: dict[str, list[float | None]] = {name: [] for name in seconds}
    for number, sample in enumerate(tracked(samples, len(samples), "Latency", unit="samples", quiet=quiet)):
        chat = messages(sample, "plain", swapped=False)
        requests = {
            "plain": request(chat, sampling=sampling),
            "probing": request(chat, sampling=sampling, states=True),
            "steering": request(chat, steers, sampling=sampling),
        }
        engine.generate([requests["plain"]])
        names = list(requests)
        for name in names[number % 3 :] + names[: number % 3]:
            memory.forget_peak(device)
            begin = time.perf_counter()
            engine.generate([requests[name]])
            seconds[name].append(time.perf_counter() - begin)
            peaks[name].append(memory.peak(device))
    times = {name: np.array(values) for name, values in seconds.items()}
    needed = {name: np.array(values, float) for name, values in peaks.items()}  # NaN if unknown
    return {name: _latency(times[name], times["plain"], needed[name], needed["plain"]) for name in times}


def _latency(values: np.ndarray, plain: np.ndarray, peaks: np.ndarray, plain_peaks: np.ndarray) -> Latency:
    both_measured = ~np.isnan(peaks + plain_peaks)
    most = float(np.median(peaks[both_measured])) if both_measured.any() else None
    memory = _ratio(peaks[both_measured], plain_peaks[both_measured]) if both_measured.any() else None
    return Latency(float(np.median(values)), *_ratio(values, plain), most, memory)


def _ratio(values: np.ndarray, plain: np.ndarray) -> tuple[float, tuple[float, float]]:
    """Return the median of the ratios of the same sample, and its interval."""
    ratios = values / plain
    return float(np.median(ratios)), interval(ratios, statistic=np.median)
