"""True and false descriptions of pictures, forced through `smol`, and what its states and neurons make of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from demo.smol import criteria
from demo.world.faithfulness import SIZE
from demo.world.questions import describe
from demo.world.scenes import COLOURS, Scene, random_scene, render
from probes.answering.base import Answerer
from probes.faithfulness import evaluate
from probes.faithfulness.samples import ForcedAnswerSample
from probes.harness.bootstrap import interval
from probes.image_pairs.traces import alike, traces
from steering import Engine

QUESTION = "Describe the picture."


@dataclass(frozen=True)
class Descriptions:
    """A picture with three descriptions: a true one, the same in reverse order, and that with one colour changed."""

    picture: Image.Image
    true: str
    consistent: str
    contradicting: str

    def sample(self, faithful: str, unfaithful: str) -> ForcedAnswerSample:
        return ForcedAnswerSample((self.picture,), QUESTION, faithful, unfaithful)


def draw(count: int, seed: int) -> list[Descriptions]:
    """Return descriptions of held-out scenes with two or three shapes."""
    rng = random.Random(f"smol descriptions {seed}")
    drawn = []
    for _ in range(count):
        scene = random_scene(rng, rng.choice((2, 3)), held_out=True)
        wrong = rng.choice(scene.shapes)
        colour = rng.choice([other for other in COLOURS if other not in {shape.colour for shape in scene.shapes}])
        things = scene.things[::-1]
        changed = tuple(thing._replace(colour=colour) if thing == wrong else thing for thing in things)
        texts = [describe(Scene(scene.background, order)) for order in (scene.things, things, changed)]
        drawn.append(Descriptions(render(scene, SIZE), *texts))
    return drawn


def measure(answerer: Answerer, engine: Engine, count: int, seed: int, quiet: bool = False) -> dict[str, Any]:
    """Return how alike consistent and contradicting descriptions are, by layer, and the neurons that false ones activate.

    answerer: the engine's. Consistent and contradicting pairs share their first description; the second ones differ in one
    word (SPD-Faith Bench paper, section 4.3).
    """
    drawn = draw(count, seed)
    replies = evaluate.read(
        answerer, [triple.sample(triple.consistent, triple.contradicting) for triple in drawn], quiet=quiet
    )
    parted = evaluate.separated(replies)["neuron_ratio"]
    return {
        "samples": count,
        "prefers the true one": float(np.mean(evaluate.preferences(replies))),
        "drift": _drift(engine, drawn),
        "neurons": parted | {"more": criteria.more_neurons(parted["share_95"])},
    }


def _drift(engine: Engine, drawn: Sequence[Descriptions]) -> dict[str, Any]:
    """Return the mean cosine of both kinds of pairs and their difference, in the thirds of the layers."""
    answers = [
        (triple.sample(triple.true, text).chat(), text)
        for triple in drawn
        for text in (triple.true, triple.consistent, triple.contradicting)
    ]
    read = list(traces(engine, answers))
    pairs = {
        name: np.array([alike(true, other) for true, other in zip(read[::3], read[number::3], strict=True)])
        for number, name in ((1, "consistent"), (2, "contradicting"))
    }
    thirds = {
        name: [third.mean(1) for third in np.array_split(cosines, criteria.ATTENTION_THIRDS, axis=1)]
        for name, cosines in pairs.items()
    }
    rows = []
    for consistent, contradicting in zip(thirds["consistent"], thirds["contradicting"], strict=True):
        change = contradicting - consistent
        bounds = interval(change)
        rows.append({
            "consistent": float(consistent.mean()), "contradicting": float(contradicting.mean()),
            "difference": float(change.mean()), "difference_95": bounds, "drifts": criteria.drifts(bounds),
        })  # fmt: skip
    return {"thirds": rows}
