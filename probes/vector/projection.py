"""States of prompts in several settings, projected to two dimensions by principal component analysis.

Source: modality-preference paper, section 4.4 and appendix C.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probes.answering.progress import tracked
from probes.conflicts.degrade import degraded
from probes.conflicts.samples import SIDES, ConflictSample, Setting, messages
from probes.harness.bootstrap import RESAMPLES, bounds
from probes.vector.build import Recipe, reading, state_of
from steering import Engine, Request

SEVERITY = 0.3
"""The severity of the degraded settings: noise leaves a picture recognisable, errors leave a text readable."""


@dataclass(frozen=True)
class Projection:
    """Projected states: `points` by setting, each (n, 2); `explained`: the share of the variance of each component."""

    points: Mapping[str, np.ndarray]
    explained: tuple[float, float]

    def centres(self) -> dict[str, list[float]]:
        """Return the mean of each setting's points."""
        return {name: points.mean(0).tolist() for name, points in self.points.items()}

    def shifts(self) -> dict[str, Any]:
        """Return how far the centres of the other settings are from the plain one.

        `distance` is by setting; `cosine` is that of the shifts of the two instructed settings, -1 if they point in opposite
        directions. Each has its 95 % interval over samples (bootstrap, the same samples in all settings; where centres
        coincide, distances are biased above 0).
        """
        plain = self.points["plain"]
        drawn = np.random.default_rng(0).integers(len(plain), size=(RESAMPLES, len(plain)))
        moved = {name: points - plain for name, points in self.points.items() if name != "plain"}
        centres = {name: (change.mean(0), change[drawn].mean(1)) for name, change in moved.items()}
        far = {name: [np.linalg.norm(centre, axis=-1) for centre in both] for name, both in centres.items()}
        sides = [f"instructed toward {side}" for side in SIDES]
        cosines = []
        for place in (0, 1):
            first, other = (centres[name][place] for name in sides)
            lengths = np.maximum(far[sides[0]][place] * far[sides[1]][place], np.finfo(float).tiny)
            cosines.append((first * other).sum(-1) / lengths)
        return {
            "distance": {name: float(value) for name, (value, _) in far.items()},
            "distance_95": {name: list(bounds(drawn)) for name, (_, drawn) in far.items()},
            "cosine": float(cosines[0]),
            "cosine_95": list(bounds(cosines[1])),
        }


def settings(samples: Sequence[ConflictSample], seed: int = 0) -> dict[str, list[tuple[ConflictSample, Setting]]]:
    """Return the paper's settings of the same samples: plain, instructed toward either side, image or text degraded."""
    image, text = ([degraded(sample, side, SEVERITY, seed) for sample in samples] for side in ("vision", "text"))
    return {
        "plain": [(sample, "plain") for sample in samples],
        "instructed toward vision": [(sample, "vision") for sample in samples],
        "instructed toward text": [(sample, "text") for sample in samples],
        "image with noise": [(sample, "plain") for sample in image],
        "text with errors": [(sample, "plain") for sample in text],
    }


def project(
    engine: Engine,
    samples: Sequence[ConflictSample],
    layer: int,
    recipe: Recipe | None = None,
    *,
    seed: int = 0,
    quiet: bool = False,
) -> Projection:
    """Project the states after `layer` in all settings onto the same two components.

    The states are read at the recipe's position in prompts of its wording.
    """
    by_setting, recipe = settings(samples, seed), recipe or Recipe()

    def requests() -> Iterator[Request]:
        for shown in by_setting.values():
            for sample, setting in shown:
                yield reading(messages(sample, setting, swapped=False, wording=recipe.wording), recipe.position)

    states = []
    total = len(by_setting) * len(samples)
    bar = tracked(engine.stream(requests()), total, "States", unit="prompts", quiet=quiet)
    for result in bar:
        states.append(state_of(result)[layer].clone())  # a view would keep every layer
    points, explained = components(torch.stack(states).numpy())
    parts = np.split(points, len(by_setting))
    return Projection(dict(zip(by_setting, parts, strict=True)), explained)


def components(states: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Project states (n, d) onto two principal components (n, 2); also return each component's share of variance."""
    centred = states.astype(np.float64) - states.mean(0, dtype=np.float64)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(states), 2))
    shares = np.zeros(2)
    count = min(2, len(sizes))
    points[:, :count] = left[:, :count] * sizes[:count]
    if (total := float((sizes**2).sum())) > 0:
        shares[:count] = sizes[:count] ** 2 / total
    return points, (float(shares[0]), float(shares[1]))
