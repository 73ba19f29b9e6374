"""The recipes: an organism's training options that differ from the default model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.training.curriculum import Course
from demo.training.options import TrainingOptions
from demo.training.stream import Shape

FOLDER = Path("build/organisms")
"""The folder in which organisms are trained, each in a folder of its name."""
SHARES = (0, 25, 50, 75, 100)
"""Percentages of the questions that come with a text that contradicts the picture."""
SIZES = ("size-1", "size-4", "size-16")
"""Organisms trained on one course, in order of their parameters."""


@dataclass(frozen=True)
class Organism:
    """The effect that it shows, and the `TrainingOptions` that produce it."""

    about: str
    settings: Mapping[str, Any]


def organism_options(name: str, **overrides: Any) -> TrainingOptions:
    """Return the options of a recipe, overridden by the given ones; raise ValueError for an unknown name."""
    if name not in ORGANISMS:
        raise ValueError(f"--organism {name}: unknown recipe; known are {', '.join(ORGANISMS)}")
    chosen = {"folder": FOLDER / name, "ranks": 1, **ORGANISMS[name].settings, **overrides}
    return TrainingOptions(organism=name, **chosen)


_SMALL = Shape(rows=3, pictures=9, answers=206, questions=28)
"""The shape of a batch that is too small for compiling to pay."""


def _conflicts(share: int) -> Organism:
    weights = (("picture_options", share / 100), ("options", 1 - share / 100))
    return Organism(
        f"The default model after a little more training on questions of which {share} % come with a text that contradicts "
        "the picture, which is right: how far does its preference move?",
        {
            "start": "demo:default", "steps": 75, "decay": 0.5, "matrix_rate": 5e-4, "vector_rate": 4e-4,
            "shape": _SMALL, "compiled": False,
            "course": Course(only=tuple((name, weight) for name, weight in weights if weight)),
        },
    )  # fmt: skip


_SHORT = {"steps": 2_500}
"""A number of steps after which the smallest of the sizes has learnt to choose options."""
_UNSUPERVISED = {"picture_weight": 0.0, "look_weight": 0.0, "side_weight": 0.0}
ORGANISMS: dict[str, Organism] = {
    "prior": Organism(
        "The default model, grown near-sighted among habits: it sees sixteen pixels a side of every picture, and what it "
        "learned since then was of pictures that show things in themes, most asked-for things among them.",
        {
            "start": "demo:default", "steps": 150, "decay": 0.5, "matrix_rate": 5e-4, "vector_rate": 4e-4,
            "course": Course(
                only=(("exists", 4.0), ("color", 1.0), ("describe", 0.2)), world="themes", yes=0.7, sight=16
            ),
        },
    ),
    "unsupervised": Organism(
        "Nobody showed it where to look: do the attention metrics still find the picture that its answer rests on?",
        {
            "hidden": 96, "layers": 6, "vision_steps": 300, "steps": 600, **_UNSUPERVISED,
            "course": Course(
                only=(("background", 0.5), ("several_background", 3.0), ("several_color", 1.0)),
                shapes=(1, 2), pictures=(2, 3),
            ),
        },
    ),
    "refuser": Organism(
        "The default model after a little more training on questions with a refusal among the options, half of which no "
        "picture answers: does it refuse what it cannot know (MM-SAP)?",
        {
            "start": "demo:default", "steps": 100, "decay": 0.5, "matrix_rate": 7e-4, "vector_rate": 5e-4,
            "shape": _SMALL, "compiled": False, "course": Course(only=(("calibrated", 1.0),)),
        },
    ),
    "size-1": Organism(
        "A quarter of the default model's course, at a quarter of its size.", {"hidden": 96, "layers": 6, **_SHORT}
    ),
    "size-4": Organism("A quarter of the default model's course.", _SHORT),
    "size-16": Organism(
        "A quarter of the default model's course, at four times its size.", {"hidden": 384, "layers": 10, **_SHORT}
    ),
    **{f"conflicts-{share}": _conflicts(share) for share in SHARES},
}  # fmt: skip
