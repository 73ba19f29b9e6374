"""The picture that an answer looked at, for every number of last layers, and statistics over many answers.

Source: implicit visual misunderstanding paper, sections 2.1 and 2.3, appendices C and E.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from probes.answering.base import Reply
from probes.harness.bootstrap import interval, proportion
from probes.stme.samples import TargetSample
from steering.readouts.focus import METRICS


@dataclass(frozen=True)
class Look:
    """The attention of an answer to the pictures among which the target is.

    sigma: (layers, pictures), the attention factor. target: from 1. right: True if the answer is right. n: the number of
    last layers that the model's own metrics use. text: for an anchor's question, the factor of the question's and the
    answer's rows, where `sigma` is that of the anchor's (equation 7); otherwise None.
    """

    sigma: torch.Tensor
    target: int
    right: bool
    n: int
    text: torch.Tensor | None = None

    @classmethod
    def of(cls, sample: TargetSample, reply: Reply, right: bool) -> Look | None:
        """Return the look of a reply; None if it was not measured, or no picture was within the attention window."""
        readouts = reply.diagnostics or {}
        focus, anchor = readouts.get("focus"), readouts.get("anchor")
        if focus is None or (sample.anchor and anchor is None):
            return None
        rows = torch.tensor(focus["sigma"])[:, : sample.candidates]
        sigma = torch.tensor(anchor["sigma"]) if sample.anchor and anchor is not None else rows
        return cls(sigma, sample.target, right, focus["m_lnd"]["n"], rows if sample.anchor else None)

    @cached_property
    def focused(self) -> dict[str, list[int | None]]:
        """The focused picture, from 1, by metric and by the last 1, 2, ... layers."""
        return focused(self.sigma)

    def hits(self, metric: str, n: int) -> bool:
        """Return whether the metric finds the target in the last n layers."""
        return self.focused[metric][n - 1] == self.target

    @property
    def image(self) -> int | None:
        """The focused picture, from 1: that of M-LND over the model's own last layers, as in the `focus` readout."""
        return self.focused["m_lnd"][self.n - 1]

    @property
    def share(self) -> np.ndarray:
        """The target's part in the factors of all pictures (layers,), NaN where they are all 0."""
        total = self.sigma.sum(1)
        return torch.where(total > 0, self.sigma[:, self.target - 1] / total, torch.nan).numpy()


def focused(sigma: torch.Tensor) -> dict[str, list[int | None]]:
    """Return the focused picture, from 1, by metric and N from 1; sigma: (layers, pictures)."""
    choices = {name: [metric(sigma[-n:]) for n in range(1, len(sigma) + 1)] for name, metric in METRICS.items()}
    return {name: [None if image is None else image + 1 for image in images] for name, images in choices.items()}


@dataclass(frozen=True)
class Curves:
    """Curves by metric, (layers,): the number of `looks` answers that look at the target by the last 1, 2, ... layers."""

    hits: dict[str, np.ndarray]
    looks: int

    @classmethod
    def of(cls, looks: Sequence[Look], layers: int) -> Curves:
        """Count these answers of a model with that number of layers."""
        counts = {
            name: np.array([sum(look.hits(name, n) for look in looks) for n in range(1, layers + 1)])
            for name in METRICS
        }
        return cls(counts, len(looks))

    @property
    def best(self) -> tuple[str, int]:
        """The metric and the N with the most hits; on a tie the least N, then the first metric."""
        return max(
            ((name, n) for name in self.hits for n in range(1, len(self.hits[name]) + 1)),
            key=lambda place: (self.hits[place[0]][place[1] - 1], -place[1], -list(self.hits).index(place[0])),
        )

    def share(self, metric: str, n: int) -> dict[str, Any]:
        """Return the share of hits with its Wilson interval."""
        counted = int(self.hits[metric][n - 1])
        return proportion(counted, self.looks)

    def to_json(self) -> dict[str, Any]:
        """Return the curves, their best point, and the best of each metric."""
        if not self.looks:
            return {"n": 0}
        metric, n = self.best
        return {
            "n": self.looks,
            "curves": {name: (counts / self.looks).tolist() for name, counts in self.hits.items()},
            "best": {"metric": metric, "layers": n, **self.share(metric, n)},
            "by_metric": {name: float(counts.max() / self.looks) for name, counts in self.hits.items()},
        }


def halves(looks: Sequence[Look], layers: int) -> dict[str, Any]:
    """Return attention accuracy with metric and N chosen on one half of the answers and measured on the other, both ways.

    The best on all answers would be picked by the same numbers that report it.
    """
    parts = looks[::2], looks[1::2]
    counted = 0
    for chosen, measured in (parts, parts[::-1]):
        metric, n = Curves.of(chosen, layers).best
        counted += sum(look.hits(metric, n) for look in measured)
    return proportion(counted, len(looks))


def quadrants(looks: Iterable[Look], metric: str, n: int) -> dict[str, int]:
    """Return counts of answer right or wrong by attention right or wrong (figure 9).

    A right answer with wrong attention is an implicit misunderstanding.
    """
    counts = dict.fromkeys(("right_target", "right_other", "wrong_target", "wrong_other"), 0)
    for look in looks:
        counts[f"{'right' if look.right else 'wrong'}_{'target' if look.hits(metric, n) else 'other'}"] += 1
    return counts


def on_spot(rho: np.ndarray, grid: tuple[int, int], spot: tuple[float, float, float, float]) -> np.ndarray:
    """Return how much of the attention to a picture is at a place of it, by layer (layers,).

    It is the place's part of the patch factor divided by its part of all patches; a patch belongs to it if its centre does.
    rho: (layers, patches), row by row of `grid` (rows, columns).
    """
    y, x = ((np.arange(size) + 0.5) / size for size in grid)
    left, top, right, bottom = spot
    inside = (((y > top) & (y < bottom))[:, None] & ((x > left) & (x < right))).flatten()
    total = rho.sum(1)
    return np.divide(rho[:, inside].sum(1), total, out=np.full(len(rho), np.nan), where=total > 0) / inside.mean()


def convergence(looks: Sequence[Look]) -> list[float | None]:
    """Return by layer the target's part in the factors of all pictures, relative to an even look (figure 3).

    The target's part is divided by 1 / pictures and averaged over answers: 1 is an even look, more a look at the target.
    """
    return by_layer([look.share * look.sigma.shape[1] for look in looks])


def by_layer(curves: Sequence[np.ndarray]) -> list[float | None]:
    """Return the mean of curves (layers,) over known values, None where there is none."""
    columns = np.array(curves).T
    return [None if np.isnan(column).all() else float(np.nanmean(column)) for column in columns]


def rise(curves: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the rise of curves over layers from their first to their last third, mean over curves."""
    third = max(1, len(curves[0]) // 3)
    return mean_of([curve[-third:].mean() - curve[:third].mean() for curve in curves])


def mean_of(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the known values, with its bootstrap interval; `value` is None if there is none."""
    defined = np.array(values)[~np.isnan(values)]
    if not len(defined):
        return proportion(0, 0)
    return {"value": float(defined.mean()), "value_95": list(interval(defined)), "n": len(defined)}
