"""The place in the target that a right answer looks at, and the place where its tokens are activated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probes.stme.attention import by_layer, mean_of, on_spot, rise
from probes.stme.evaluate import Answered
from probes.stme.samples import TargetSample

Grid = tuple[int, int]


def patches(answered: Answered) -> dict[str, Any]:
    """Return how much of the look at the target is at the place of the answer, by layer, mean over answers.

    1 is as much as anywhere. `said` is the same for the token activation maps of the answer; `case` holds the map of one
    sample (equation 6, figure 6).
    """
    maps: list[tuple[TargetSample, np.ndarray, Grid]] = []
    activations: list[float] = []
    for sample, (reply,) in zip(answered.part.samples, answered.replies, strict=True):
        read = reply.diagnostics or {}
        grid = read["images"][sample.target - 1]["grid"]
        if grid is not None:
            maps.append((sample, np.array(read["patches"][sample.target - 1]["rho"]), tuple(grid)))
            activations.append(activation_on_spot(read.get("tam") or (), sample, tuple(grid)))
    curves = [on_spot(rho, grid, sample.spot) for sample, rho, grid in maps if sample.spot is not None]
    results: dict[str, Any] = {"n": len(curves)}
    if curves:
        results |= {"on_spot": by_layer(curves), "rise": rise(curves), "said": mean_of(activations)}
    if maps:
        sample, rho, grid = maps[0]
        results["case"] = {"sample": sample.id, "grid": list(grid), "rho": rho.tolist()}
    return results


def activation_on_spot(tam: Sequence[Mapping[str, Any]], sample: TargetSample, grid: Grid) -> float:
    """Return how much of the target's token activation maps is at the place of the answer (1: as much as anywhere).

    The maps are those of the SPD-Faith Bench paper, equations 17 and 18. The value is the mean over the tokens of the answer
    whose map is not empty; NaN if none is known. Every token of the answer counts, so that there is no selection. tam: as
    the readout returns it.
    """
    maps = [entry["map"] for entry in tam if entry["image"] == sample.target]
    if sample.spot is None or not maps:
        return np.nan
    parts = on_spot(np.array(maps), grid, sample.spot)
    return float(np.nanmean(parts)) if not np.isnan(parts).all() else np.nan
