"""Where in the target a right answer looks, and where the picture's tokens would say what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from probes.stme.attention import by_layer, mean_of, on_spot, rise
from probes.stme.evaluate import Answered
from probes.stme.samples import TargetSample

Grid = tuple[int, int]


def patches(answered: Answered) -> dict[str, Any]:
    """How much of the look at the target is where in it the answer is, by layer (1: as much as anywhere), mean over answers;
    `said`, the same of the token activation maps of the answer; and the map of one (equation 6, figure 6)."""
    maps: list[tuple[TargetSample, np.ndarray, Grid]] = []
    said: list[float] = []
    for sample, (reply,) in zip(answered.part.samples, answered.replies, strict=True):
        read = reply.diagnostics or {}
        grid = read["images"][sample.target - 1]["grid"]
        if grid is not None:
            maps.append((sample, np.array(read["patches"][sample.target - 1]["rho"]), tuple(grid)))
            said.append(activation_on_spot(read.get("tam") or (), sample, tuple(grid)))
    curves = [on_spot(rho, grid, sample.spot) for sample, rho, grid in maps if sample.spot is not None]
    found: dict[str, Any] = {"n": len(curves)}
    if curves:
        found |= {"on_spot": by_layer(curves), "rise": rise(curves), "said": mean_of(said)}
    if maps:
        sample, rho, grid = maps[0]
        found["case"] = {"sample": sample.id, "grid": list(grid), "rho": rho.tolist()}
    return found


def activation_on_spot(tam: Sequence[Mapping[str, Any]], sample: TargetSample, grid: Grid) -> float:
    """How much of a token activation map of the target (SPD-Faith Bench paper, equations 17, 18) is where in it the answer
    is (1: as much as anywhere), mean over the tokens of the answer whose map is not empty; NaN where none is known. The
    answer's every token counts, so that none is chosen. tam: as the readout has it."""
    maps = [one["map"] for one in tam if one["image"] == sample.target]
    if sample.spot is None or not maps:
        return np.nan
    parts = on_spot(np.array(maps), grid, sample.spot)
    return float(np.nanmean(parts)) if not np.isnan(parts).all() else np.nan
