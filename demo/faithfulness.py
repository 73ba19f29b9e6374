"""Held-out samples of the world for `probes.faithfulness`: existence in POPE's format, and pairs with one difference."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, cycle, islice

import numpy as np
from PIL import Image

from demo.questions import article
from demo.several import DIFFERENCE_KINDS, difference_pair
from demo.wordings import EXISTS
from demo.world import SHAPES, Scene, Size, random_scene, render
from probes.faithfulness import Difference, Existence, Setting

SIZE = (168, 168)
SETTINGS: tuple[Setting, ...] = ("random", "popular", "adversarial")
TYPES = {"color": "color", "remove": "remove", "move": "position", "add": "add", "none": None}


def existence_samples(count: int, seed: int, size: Size = SIZE, noise: float = 0.0) -> list[Existence]:
    """`count` questions over held-out scenes: in each setting as many objects that are there as that are not.

    `noise` is the standard deviation of what is added to every pixel's values of 0 to 255.
    """
    rng, noise_rng = random.Random(f"held-out existence {seed}"), _noise_rng(seed)
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
        image = _noised(render(scene, size, rng), noise, noise_rng)
        for kind, present in ((rng.choice(found), True), (absent[0], False)):
            samples.append(Existence(image, rng.choice(EXISTS).format(thing=article(kind)), present, setting))
    return samples[:count]


def _scene(rng: random.Random) -> Scene:
    return random_scene(rng, rng.choice((2, 3, 3, 4)), held_out=True)


def difference_samples(count: int, seed: int, size: Size = SIZE, noise: float = 0.0) -> list[Difference]:
    """`count` held-out pairs, the kinds of difference (and none) in turn; `noise` as above, another in each picture."""
    rng, noise_rng = random.Random(f"held-out differences {seed}"), _noise_rng(seed)
    samples = []
    for kind in islice(cycle(DIFFERENCE_KINDS), count):
        first, second, question = difference_pair(rng, kind, (2, 2, 3), held_out=True)
        answer = question.turns[0][1]
        category = next((shape for shape in SHAPES if shape in answer), None)
        before, after = (_noised(render(scene, size, rng), noise, noise_rng) for scene in (first, second))
        samples.append(Difference(before, after, TYPES[kind], category))
    return samples


def _noise_rng(seed: int) -> np.random.Generator:
    """Of its own, so that the same questions come with noise and without."""
    return np.random.default_rng(random.Random(f"noise {seed}").getrandbits(64))


def _noised(picture: Image.Image, noise: float, rng: np.random.Generator) -> Image.Image:
    if noise == 0:
        return picture
    values = np.asarray(picture) + rng.normal(0, noise, (*picture.size[::-1], 3))
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
