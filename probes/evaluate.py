"""Measure what a vector does on fresh conflicts: the three shares per condition, damage, and random directions beside.

Random directions have the vector's norm at each of its layers, so that they are the same dose (modality-preference
paper, section 5, asks for none; without them any large push that moves the shares would look like steering).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from probes.asking import Condition, ask
from probes.mc2 import Sample, Shares
from steering import Engine, Steer, SteeringVector

RESAMPLES = 1000


@dataclass(frozen=True)
class Measured:
    """One condition: its shares on conflicts and, where nothing conflicts (image only), the share of right answers."""

    shares: Shares
    accuracy: float | None = None

    def to_json(self) -> dict[str, Any]:
        return self.shares.to_json() | ({} if self.accuracy is None else {"no_conflict_accuracy": self.accuracy})


@dataclass(frozen=True)
class Evaluation:
    """`conditions` by name: plain, vision, text and, where asked for, instruct_vision and instruct_text; `random`: the
    shares under each random direction."""

    conditions: dict[str, Measured]
    random: tuple[Shares, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """One object a condition, and `random` only where controls were asked for."""
        report: dict[str, Any] = {name: measured.to_json() for name, measured in self.conditions.items()}
        if self.random:
            report["random"] = {
                "directions": len(self.random),
                "vision_ratio": spread([shares.vision_ratio for shares in self.random]),
                "s_others": spread([shares.s_others for shares in self.random]),
                "each": [shares.to_json() for shares in self.random],
            }
        return report


def evaluate(
    engine: Engine,
    vector: SteeringVector,
    samples: Sequence[Sample],
    *,
    strength: float = 1.0,
    instruct: bool = False,
    random_directions: int = 0,
    seed: int = 0,
    quiet: bool = False,
) -> Evaluation:
    """Ask the samples plainly, steered both ways, and as asked for instructed and pushed in random directions."""
    steers: dict[str, tuple[Steer, ...]] = {"plain": ()}
    for toward in ("vision", "text"):
        steers[toward] = (Steer.to(vector, toward, strength),)
    shown = {name: Condition("plain", steer) for name, steer in steers.items()}
    if instruct:
        shown |= {"instruct_vision": Condition("vision"), "instruct_text": Condition("text")}
    alone = {name: Condition("image_only", steer) for name, steer in steers.items()}
    answers = ask(engine, samples, [*shown.values(), *alone.values()], title="Conditions", quiet=quiet)
    accuracies = {name: answer.accuracy() for name, answer in zip(alone, answers[len(shown) :], strict=True)}
    conditions = {
        name: Measured(Shares.of(answer.outcomes, RESAMPLES, seed), accuracies.get(name))
        for name, answer in zip(shown, answers, strict=False)
    }
    controls = [
        Condition("plain", (Steer.to(random_like(vector, seed + i), "text", strength),))
        for i in range(random_directions)
    ]
    pushed = ask(engine, samples, controls, title="Random directions", quiet=quiet) if controls else []
    return Evaluation(conditions, tuple(Shares.of(answer.outcomes) for answer in pushed))


def random_like(vector: SteeringVector, seed: int) -> SteeringVector:
    """A vector of random directions with the norms of w_l * v_l, layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    push = vector.weight[:, None] * vector.direction
    noise = torch.randn(push.shape, generator=generator)
    noise *= push.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
    return replace(vector, name=f"random-{seed}", direction=noise, weight=torch.ones_like(vector.weight), info={})


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Least, mean and greatest of the values that exist."""
    known = [value for value in values if value is not None]
    if not known:
        return {"min": None, "mean": None, "max": None}
    return {"min": min(known), "mean": statistics.fmean(known), "max": max(known)}


def print_table(evaluation: Evaluation, title: str) -> None:
    """The evaluation as a table on standard output."""
    table = Table(title=title, title_justify="left")
    for name in ("condition", "vision", "text", "others", "Vision Ratio", "no conflict"):
        table.add_column(name, justify="left" if name == "condition" else "right", no_wrap=True)
    for name, measured in evaluation.conditions.items():
        shares = measured.shares
        table.add_row(
            name.replace("_", " "), f"{shares.s_vision:.3f}", f"{shares.s_text:.3f}", f"{shares.s_others:.3f}",
            _number(shares.vision_ratio), _number(measured.accuracy),
        )  # fmt: skip
    if evaluation.random:
        table.add_section()
        fields = ("s_vision", "s_text", "s_others", "vision_ratio")
        columns = [[getattr(shares, field) for shares in evaluation.random] for field in fields]
        for row in ("min", "mean", "max"):
            values = [_number(spread(column)[row]) for column in columns]
            table.add_row(f"{len(evaluation.random)} random, {row}", *values, "-")
    Console().print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
