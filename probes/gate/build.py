"""A condition vector from examples: direction, layer, measure and threshold, and what they are worth on other examples.

Source: CAST (Lee et al. 2024, Programming Refusal with Conditional Activation Steering, section 3), with the mean difference
as the direction. The paper searches layer and threshold on the examples that it reports; here half of the examples make the
direction, a quarter chooses layer, measure and threshold, and the last quarter, which nothing was chosen on, is reported.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probes.answering.engine import with_picture
from probes.answering.progress import Tracker
from probes.answering.versions import versions
from probes.gate.file import GateExample
from probes.harness.bootstrap import area, area_with_interval, wilson
from probes.pairs.learners import Learner
from probes.pairs.logistic import fit
from probes.vector.build import check_layers, reading, state_of
from steering import Engine, SteeringVector

KIND = "condition"
"""The kind of these vectors, which are no modality preference."""
LEAST = 16
"""The least number of examples of either side, of which a quarter is reported on."""
GOOD = 0.7
"""The least AUROC of a condition that is worth having."""


@dataclass(frozen=True)
class Split:
    """The examples by their use, as indices."""

    direction: list[int]
    choice: list[int]
    report: list[int]

    @classmethod
    def of(cls, examples: Sequence[GateExample], seed: int) -> Split:
        """Return half, a quarter and a quarter of each side, drawn at random."""
        drawn, parts = random.Random(seed), cls([], [], [])
        for holds in (True, False):
            own = [number for number, example in enumerate(examples) if example.holds is holds]
            drawn.shuffle(own)
            quarter = len(own) // 4
            parts.report.extend(own[:quarter])
            parts.choice.extend(own[quarter : 2 * quarter])
            parts.direction.extend(own[2 * quarter :])
        return parts


def states_of(engine: Engine, examples: Sequence[GateExample], quiet: bool = False) -> torch.Tensor:
    """Return the states of the prompts' last tokens, (examples, layers, d)."""
    requests = (reading(with_picture(engine.mllm, example.prompt.chat()), -1) for example in examples)
    states = []
    with Tracker("Reading the examples", {"": len(examples)}, unit="examples", quiet=quiet) as progress:
        for result in engine.stream(requests):
            states.append(state_of(result).double())
            progress.advance()
    return torch.stack(states)


def build(
    engine: Engine,
    examples: Sequence[GateExample],
    *,
    name: str,
    layers: Sequence[int] | None = None,
    learner: Learner = "mean",
    seed: int = 0,
    quiet: bool = False,
) -> SteeringVector:
    """Return the condition vector of these examples; `info["gate"]` has its layer, measure and threshold, and its worth.

    layers: those to choose from, all by default. learner: mean, or probe for a logistic probe of each layer. Raises
    ValueError for layers that the model does not have.
    """
    check_layers(engine, layers)
    states, split = states_of(engine, examples, quiet), Split.of(examples, seed)
    holds = np.array([example.holds for example in examples])
    inside, outside = (states[[i for i in split.direction if holds[i] == side]] for side in (True, False))
    bias: list[float] | None = None
    if learner == "probe":
        difference, bias = probes(states[split.direction], holds[split.direction])
        logits = (states * difference).sum(-1) + torch.tensor(bias, dtype=torch.float64)
        values = {"probe": logits.sigmoid().numpy()}
    else:
        difference = inside.mean(0) - outside.mean(0)
        values = measures(states, difference)
    chosen = choose({name: value[split.choice] for name, value in values.items()}, holds[split.choice], layers)
    size = difference.abs().mean(-1)
    spread = (inside.std(0) ** 2 + outside.std(0) ** 2).div(2).sqrt().mean(-1)
    digests = [json_digest(example) for example in examples]
    info: dict[str, Any] = {
        "samples": len(split.direction),
        "published": 1.0,
        "seed": seed,
        "data_sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
        "std": "over examples of a side, mean over dimensions",
        "versions": versions(),
        "gate": {
            **chosen,
            **({} if bias is None else {"bias": bias}),
            **worth(values[chosen["measure"]][split.report, chosen["layer"]], holds[split.report], chosen),
        },
    }
    return SteeringVector(
        name, difference.float(), (states.abs().mean((0, -1)) / size.clamp(min=1e-12)).float(), size.float(),
        spread.float(), (chosen["layer"],), engine.mllm.fingerprint, KIND, info,
    )  # fmt: skip


def json_digest(example: GateExample) -> str:
    """Return a digest of an example's prompt and side."""
    return f"{example.prompt.digest} {example.holds}\n"


def probes(states: torch.Tensor, holds: np.ndarray) -> tuple[torch.Tensor, list[float]]:
    """Return the weights (layers, d) and the biases of each layer's logistic probe of states (examples, layers, d).

    They are rounded to float32, as the vector holds them.
    """
    fits = [fit(states[:, layer].numpy(), holds) for layer in range(states.shape[1])]
    weights = torch.stack([torch.from_numpy(weights).float().double() for weights, _ in fits])
    return weights, [bias for _, bias in fits]


def measures(states: torch.Tensor, direction: torch.Tensor) -> dict[str, np.ndarray]:
    """Return both measures of states (examples, layers, d) along a direction (layers, d): (examples, layers) each."""
    along = (states * direction).sum(-1) / direction.norm(dim=-1)
    by_name = {"cosine": along / states.norm(dim=-1), "projection": along}
    return {name: value.nan_to_num().numpy() for name, value in by_name.items()}


def choose(values: dict[str, np.ndarray], holds: np.ndarray, layers: Sequence[int] | None) -> dict[str, Any]:
    """Return layer and measure with the greatest AUROC on these examples, and the threshold that tells them apart best.

    Where several tell all of them apart, that with the greatest distance between the sides' means in deviations wins.
    values: (examples, layers) by measure.
    """
    count = next(iter(values.values())).shape[1]
    tried = [(measure, layer) for measure in values for layer in (layers or range(count))]

    def quality(place: tuple[str, int]) -> tuple[float, float]:
        own = values[place[0]][:, place[1]]
        spread = np.sqrt((own[holds].var() + own[~holds].var()) / 2)
        return round(area(own, holds), 6), float((own[holds].mean() - own[~holds].mean()) / max(spread, 1e-12))

    measure, layer = max(tried, key=quality)
    return {"layer": layer, "measure": measure, "threshold": threshold(values[measure][:, layer], holds)}


def threshold(values: np.ndarray, holds: np.ndarray) -> float:
    """Return the bound with the greatest balanced accuracy; of several, the middle of the widest gap between values."""
    ordered = np.unique(values)
    if len(ordered) == 1:
        return float(ordered[0])
    bounds, gaps = (ordered[1:] + ordered[:-1]) / 2, np.diff(ordered)
    accuracies = [((values[holds] > bound).mean() + (values[~holds] <= bound).mean()) / 2 for bound in bounds]
    best = max(zip(np.round(accuracies, 9), gaps, bounds, strict=True))
    return float(best[2])


def worth(values: np.ndarray, holds: np.ndarray, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return AUROC and the shares of either side for which the condition holds, with 95 % intervals."""
    measured = area_with_interval(values, holds)
    opens = values > chosen["threshold"]

    def share(side: np.ndarray) -> list[float]:
        counted, total = int(opens[side].sum()), int(side.sum())
        return [counted / total, *wilson(counted, total)]

    return {
        "examples": [int(holds.sum()), int((~holds).sum())],
        "auroc": None if measured is None else [measured[0], *measured[1]],
        "open_when": share(holds),
        "open_not": share(~holds),
    }


def too_few(examples: Sequence[GateExample]) -> list[str]:
    """Return a sentence for each side that has too few different examples."""
    counts = {'"when"': sum(example.holds for example in examples)}
    counts['"not"'] = len(examples) - counts['"when"']
    return [
        f"There are too few different examples under {side}: {count}; at least {LEAST} are needed."
        for side, count in counts.items()
        if count < LEAST
    ]


def doubtful(vector: SteeringVector) -> list[str]:
    """Return a sentence where the condition does not tell the examples apart that nothing was chosen on."""
    auroc = vector.info["gate"]["auroc"]
    if auroc is not None and auroc[0] >= GOOD and auroc[1] > 0.5:
        return []
    shown = "unknown" if auroc is None else "{:.2f} ({:.2f} to {:.2f})".format(*auroc)
    return [
        f"The condition does not tell other examples apart: AUROC {shown}; at least {GOOD} is wanted, 0.5 is chance."
    ]
