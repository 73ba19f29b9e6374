"""Held-out questions with a right answer and one that is wrong in one word or two."""

from __future__ import annotations

import random

from demo.world.faithfulness import SIZE, noise_source, noised
from demo.world.questions import alternative, ask, describe, pick_fact, statement
from demo.world.scenes import Scene, allowed_colours, random_scene, render
from demo.world.wordings import DESCRIBE
from probes.faithfulness.samples import ForcedAnswerSample

KINDS = ("color", "shape", "position", "at", "background", "count")


def forced_answer_samples(count: int, seed: int, noise: float = 0.0) -> list[ForcedAnswerSample]:
    """Return `count` samples, descriptions and facts in turn.

    `noise` is the standard deviation of the noise added to every pixel's values of 0 to 255.
    """
    rng, noise_rng, samples = random.Random(f"held-out told {seed}"), noise_source(seed), list[ForcedAnswerSample]()
    while len(samples) < count:
        scene = random_scene(rng, rng.choice((2, 3, 3, 4)), held_out=True)
        texts = _description(rng, scene) if len(samples) % 2 else _fact(rng, scene)
        if texts is not None:
            picture = noised(render(scene, SIZE, rng), noise, noise_rng)
            samples.append(ForcedAnswerSample((picture,), *texts))
    return samples


def _fact(rng: random.Random, scene: Scene) -> tuple[str, str, str, str] | None:
    fact = pick_fact(rng, scene, KINDS)
    if fact is None:
        return None
    wrong = alternative(rng, scene, fact.kind, fact.value)
    right, wrong_text = (statement(fact.kind, fact.key, value) for value in (fact.value, wrong))
    return ask(rng, fact.kind, fact.key), right, wrong_text, "fact"


def _description(rng: random.Random, scene: Scene) -> tuple[str, str, str, str] | None:
    """Return a description and a wrong one, in which one of the things has another colour."""
    thing = rng.choice(scene.shapes)
    other_colours = [colour for colour in allowed_colours(scene.background) if colour != thing.colour]
    wrong = scene.replace(thing, thing._replace(colour=rng.choice(other_colours)))
    return rng.choice(DESCRIBE), describe(scene), describe(wrong), "description"
