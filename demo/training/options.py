"""Options of a training run, its learning rate, and its number format."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from demo.training.curriculum import Course
from demo.training.stream import Shape

PLAN_EVERY = 25  # steps between two looks at the accuracies


@dataclass(frozen=True)
class TrainingOptions:
    """The options that fully determine a run; steps count optimizer steps of all ranks together."""

    folder: Path = Path("build/demo")
    steps: int = 9_500
    seed: int = 1
    vision_steps: int = 700
    decay: float = 0.3  # last share of the steps, in which the learning rate falls to zero
    matrix_rate: float = 2e-3
    vector_rate: float = 1.5e-3
    embedding_scale: float = 0.2
    picture_weight: float = 0.05
    look_weight: float = 0.1
    side_weight: float = 0.2
    ranks: int = 2
    device: str = "cpu"
    compiled: bool = True
    bfloat16: bool | None = None  # None: where the machine multiplies it faster than float32
    background: bool = True  # make batches in a separate process
    save_minutes: float = 3.0
    log_every: int = 100
    shape: Shape = field(default_factory=Shape)
    hidden: int = 192
    layers: int = 8
    organism: str | None = None  # the recipe that these options come from; None: the default model's
    course: Course = field(default_factory=Course)
    start: str | None = None  # a shipped model to start from, instead of from scratch

    def __post_init__(self) -> None:
        if self.steps % PLAN_EVERY:
            raise ValueError(f"--steps {self.steps}: must be a multiple of {PLAN_EVERY}")
        if self.steps < 1 or self.ranks < 1:
            raise ValueError(f"--steps {self.steps}, --ranks {self.ranks}: both must be at least 1")
        if self.ranks > 1 and self.device != "cpu":
            raise ValueError(f"--ranks {self.ranks} --device {self.device}: several ranks are for the CPU")


def use_bfloat16(options: TrainingOptions) -> bool:
    """Return whether to multiply in bfloat16, which pays on GPUs and on CPUs with AMX tiles.

    AVX512-BF16 alone is slower than float32 (measured).
    """
    if options.bfloat16 is not None:
        return options.bfloat16
    return options.device != "cpu" or torch.cpu._is_amx_tile_supported()


def learning_rate(step: int, options: TrainingOptions) -> float:
    """Return the share of the full rate: a short warm-up, flat, then a cosine to zero over the last `decay` of the steps."""
    start = options.steps * (1 - options.decay)
    warm = min(1.0, (step + 1) / 100)
    if step < start:
        return warm
    return warm * max(0.01, 0.5 * (1 + math.cos(math.pi * (step - start) / (options.steps - start))))
