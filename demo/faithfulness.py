"""Held-out samples of the world for `probes.faithfulness`: existence in POPE's format, and pairs with one difference."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, cycle, islice

from demo.questions import article
from demo.several import DIFFERENCE_KINDS, difference_pair
from demo.wordings import EXISTS
from demo.world import SHAPES, Scene, Size, random_scene, render
from probes.faithfulness import Difference, Existence, Setting

SETTINGS: tuple[Setting, ...] = ("random", "popular", "adversarial")
TYPES = {"color": "color", "remove": "remove", "move": "position", "add": "add", "none": None}


def existence_samples(count: int, seed: int, size: Size = (168, 168)) -> list[Existence]:
    """`count` questions over held-out scenes: in each setting as many objects that are there as that are not."""
    rng = random.Random(f"held-out existence {seed}")
    scenes = [_scene(rng) for _ in range(-(-count // 2))]
    kinds = [sorted({thing.kind for thing in scene.shapes}) for scene in scenes]
    frequency = Counter(kind for found in kinds for kind in found)
    together = Counter(pair for found in kinds for pair in combinations(found, 2))
    samples = []
    for scene, found, setting in zip(scenes, kinds, cycle(SETTINGS), strict=False):
        absent = [kind for kind in SHAPES if kind not in found]
        rng.shuffle(absent)
        if setting == "popular":
            absent.sort(key=lambda kind: -frequency[kind])
        elif setting == "adversarial":
            absent.sort(key=lambda kind: -sum(together[min(kind, f), max(kind, f)] for f in found))
        image = render(scene, size, rng)
        for kind, present in ((rng.choice(found), True), (absent[0], False)):
            samples.append(Existence(image, rng.choice(EXISTS).format(thing=article(kind)), present, setting))
    return samples[:count]


def _scene(rng: random.Random) -> Scene:
    return random_scene(rng, rng.choice((2, 3, 3, 4)), held_out=True)


def difference_samples(count: int, seed: int, size: Size = (168, 168)) -> list[Difference]:
    """`count` held-out pairs, the kinds of difference (and none) in turn."""
    rng = random.Random(f"held-out differences {seed}")
    samples = []
    for kind in islice(cycle(DIFFERENCE_KINDS), count):
        first, second, question = difference_pair(rng, kind, (2, 2, 3), held_out=True)
        answer = question.turns[0][1]
        category = next((shape for shape in SHAPES if shape in answer), None)
        samples.append(Difference(render(first, size, rng), render(second, size, rng), TYPES[kind], category))
    return samples
