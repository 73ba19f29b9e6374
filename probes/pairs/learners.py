"""Directions that the field's methods learn from the states of pairs of prompts, layer by layer.

States are those behind a layer, (pairs, layers, d). ITI's paper learns and shifts the outputs of attention heads; here its
formula is applied to the states behind a layer, which steering can shift.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from probes.harness.bootstrap import area, area_with_interval
from probes.pairs.logistic import fit
from steering import SteeringVector

Learner = Literal["mean", "actadd", "pca", "lat", "iti", "probe"]
LEARNERS: tuple[Learner, ...] = get_args(Learner)

FORMULAS: dict[Learner, str] = {
    "mean": "v = mean over the pairs of h({plus}) - h({minus}) (Rimsky et al. 2024, section 3; Belrose 2023)",
    "actadd": "v = h({plus}) - h({minus}) of a single pair (ActAdd: Turner et al. 2023, section 3)",
    "pca": "v = first principal component of the states of both sides, centred, turned toward {plus}",
    "lat": "v = first principal component of the pairs' differences, each in a random order, centred, turned so that most "
    "pairs project farther for {plus} (LAT: Zou et al. 2023, section 3.1, as their RepReading pipeline computes it)",
    "iti": "v = sigma u, u = unit mean difference {plus} - {minus}, sigma = deviation of all states along u, so that "
    "strength is the paper's alpha; layers by the accuracy of linear probes (ITI: Li et al. 2023, section 3, here on the "
    "states behind a layer instead of the outputs of heads)",
    "probe": "v = weights of a logistic regression of {plus} against {minus} (Alain and Bengio 2016)",
}


@dataclass(frozen=True)
class PairStates:
    """The states of pairs under either side, (pairs, layers, d) in float64."""

    toward: np.ndarray
    away: np.ndarray

    def __len__(self) -> int:
        return len(self.toward)

    def of(self, rows: Sequence[int]) -> PairStates:
        """Return those of some pairs."""
        return PairStates(self.toward[list(rows)], self.away[list(rows)])

    @property
    def is_toward(self) -> np.ndarray:
        """True for the first half of `both`."""
        return np.arange(2 * len(self)) < len(self)

    @property
    def both(self) -> np.ndarray:
        """The states of the first side, then of the other one, (2 pairs, layers, d)."""
        return np.concatenate([self.toward, self.away])


def learn(learner: Learner, states: PairStates, seed: int = 0) -> np.ndarray:
    """Return the direction of every layer, (layers, d): see `FORMULAS`."""
    difference = (states.toward - states.away).mean(0)
    if learner in ("mean", "actadd"):
        return difference
    layers = range(difference.shape[0])
    if learner == "iti":
        unit = _unit(difference)
        along = (states.both * unit).sum(-1)
        return unit * along.std(0, ddof=1)[:, None]
    if learner == "probe":
        return np.stack([fit(states.both[:, layer], states.is_toward)[0] for layer in layers])
    if learner == "pca":
        axes = np.stack([_component(states.both[:, layer]) for layer in layers])
        return axes * np.where((axes * difference).sum(-1) < 0, -1.0, 1.0)[:, None]
    return _lat(states, seed)


def _lat(states: PairStates, seed: int) -> np.ndarray:
    differences, drawn = states.toward - states.away, random.Random(seed)
    signs = np.array([_first_of_shuffled(drawn) for _ in range(len(states))])
    shuffled = differences * signs[:, None, None]
    axes = np.stack([_component(shuffled[:, layer]) for layer in range(differences.shape[1])])
    along = (differences * axes).sum(-1)
    votes = (along > 0).sum(0) - (along < 0).sum(0)
    return axes * np.where(votes < 0, -1.0, 1.0)[:, None]


def _first_of_shuffled(drawn: random.Random) -> int:
    """Return 1 or -1, drawn as the authors shuffle each pair."""
    pair = [1, -1]
    drawn.shuffle(pair)
    return pair[0]


def _component(rows: np.ndarray) -> np.ndarray:
    """Return the first principal component of rows (samples, d)."""
    return np.asarray(np.linalg.svd(rows - rows.mean(0), full_matrices=False)[2][0])


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-30)


@dataclass(frozen=True)
class HeldOut:
    """The test on a quarter of the pairs of directions that were learned from the others.

    ranking: layers, the best first. auroc: of the best one with its 95 % interval, which is a little too good where the best
    of many layers was chosen on the same pairs. accuracy: of linear probes, for ITI only.
    """

    pairs: int
    ranking: list[int]
    auroc: tuple[float, tuple[float, float]] | None
    accuracy: list[float] | None = None

    @classmethod
    def of(cls, learner: Learner, states: PairStates, seed: int, layers: Sequence[int]) -> HeldOut:
        """Return the measurement for these layers; of equal ones that with the greater distance between the sides wins."""
        order = [*range(len(states))]
        random.Random(seed).shuffle(order)
        held_out, training = (states.of(rows) for rows in (order[: len(order) // 4], order[len(order) // 4 :]))
        is_toward, directions = held_out.is_toward, learn(learner, training, seed)
        along = (held_out.both * directions).sum(-1)
        accuracy = None
        if learner == "iti":
            accuracy = [0.0] * directions.shape[0]
            for layer in layers:
                weights, bias = fit(training.both[:, layer], training.is_toward)
                accuracy[layer] = float(((held_out.both[:, layer] @ weights + bias > 0) == is_toward).mean())

        def quality(layer: int) -> tuple[float, float]:
            own = along[:, layer]
            spread = np.sqrt((own[is_toward].var() + own[~is_toward].var()) / 2)
            apart = float((own[is_toward].mean() - own[~is_toward].mean()) / max(spread, 1e-12))
            return (area(own, is_toward) if accuracy is None else accuracy[layer], apart)

        ranking = sorted(layers, key=quality, reverse=True)
        return cls(len(held_out), ranking, area_with_interval(along[:, ranking[0]], is_toward), accuracy)

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as a vector stores it."""
        auroc = None if self.auroc is None else [self.auroc[0], *self.auroc[1]]
        return {"pairs": self.pairs, "auroc": auroc, **({} if self.accuracy is None else {"accuracy": self.accuracy})}


def learned(
    vector: SteeringVector, learner: Learner, states: PairStates, layers: Sequence[int] | None, seed: int
) -> SteeringVector:
    """Return the vector of the same pairs with the direction of a learner.

    Its layer is the best one on held-out pairs; that of ActAdd is the first of `layers`. Strength 1 adds as much as the
    states are large, as for any vector; for ITI it is one sigma.
    """
    count = len(vector.direction)
    direction = torch.from_numpy(learn(learner, states, seed))
    magnitude = torch.from_numpy(np.abs(states.both).mean((0, -1)))
    size = direction.abs().mean(-1)
    held_out = None
    if learner == "actadd":
        ranking = list(layers or range(count))
    else:
        held_out = HeldOut.of(learner, states, seed, layers or range(count))
        ranking = held_out.ranking
    published = magnitude / size.clamp(min=1e-30)
    weight = torch.ones_like(published) if learner == "iti" else torch.where(size > 0, published, 0.0)
    along = torch.from_numpy(((states.toward - states.away) * _unit(direction.numpy())).sum(-1))
    spread = along.std(0, correction=0) * (size / direction.norm(dim=-1).clamp(min=1e-30))
    info = {name: value for name, value in vector.info.items() if name != "recipe"} | {
        "ranking": ranking,
        "score": (size / spread.clamp(min=1e-12)).tolist() if len(states) > 1 else [0.0] * count,
        "published": float(weight[ranking[0]] / published[ranking[0]]),
        "std": "over pairs, of their difference along the direction, per dimension",
        "learner": {"name": learner, "seed": seed, **({} if held_out is None else {"held_out": held_out.to_json()})},
    }
    return replace(
        vector, direction=direction.float(), weight=weight.float(), mean_abs=size.float(), std=spread.float(),
        layers=(ranking[0],), info=info,
    )  # fmt: skip


def doubtful(vector: SteeringVector) -> list[str]:
    """Return a sentence where a learned direction does not tell held-out pairs apart."""
    held_out = vector.info.get("learner", {}).get("held_out")
    if held_out is None or (held_out["auroc"] is not None and held_out["auroc"][1] > 0.5):
        return []
    shown = "unknown" if held_out["auroc"] is None else "{:.2f} ({:.2f} to {:.2f})".format(*held_out["auroc"])
    return [f"The direction does not tell held-out pairs apart: AUROC {shown}; 0.5 is chance."]
