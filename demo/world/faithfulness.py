"""Held-out samples of the world for benchmarks of faithfulness: existence in POPE's format, and pairs with differences."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, cycle, islice

import numpy as np
from PIL import Image

from demo.world.questions import article
from demo.world.scenes import (
    EVEN,
    POSITIONS,
    SHAPES,
    Habits,
    Scene,
    Size,
    allowed_colours,
    breaking_scene,
    random_scene,
    render,
)
from demo.world.wordings import EXISTS
from probes.image_pairs.metrics import TYPES, Claim
from probes.image_qa.pope import Strategy
from probes.image_qa.yes_no import YesNo
from probes.sage.samples import Difference
from probes.spd.samples import Difficulty, PicturePair

SIZE = (168, 168)
STRATEGIES: tuple[Strategy, ...] = ("random", "popular", "adversarial")
NUMBERS = (1, 2, 1, 3, 1, 0)
"""The numbers of differences that the pairs have, in turn."""
DENSITIES: dict[Difficulty, int] = {"easy": 2, "medium": 4, "hard": 6}
"""The numbers of shapes in pictures with a single difference; the benchmark's difficulty is the density of instances."""
SEVERAL = (2, 3, 4, 5)


def existence_samples(
    count: int, seed: int, size: Size = SIZE, noise: float = 0.0, habits: Habits = EVEN
) -> list[YesNo]:
    """Return `count` questions over held-out scenes, in each setting half of them about objects that are present.

    `noise` is the standard deviation of the noise added to every pixel's values of 0 to 255. The scenes of a world that has
    habits break them.
    """
    rng, noise_rng = random.Random(f"held-out existence {seed}"), noise_source(seed)
    scenes = [_scene(rng, habits) for _ in range(-(-count // 2))]
    kinds = [sorted({thing.kind for thing in scene.shapes}) for scene in scenes]
    frequency = Counter(kind for kinds_of_scene in kinds for kind in kinds_of_scene)
    together = Counter(pair for kinds_of_scene in kinds for pair in combinations(kinds_of_scene, 2))
    samples = []
    for scene, kinds_there, setting in zip(scenes, kinds, cycle(STRATEGIES), strict=False):
        absent = [kind for kind in SHAPES if kind not in kinds_there]
        rng.shuffle(absent)
        if setting == "popular":
            absent.sort(key=lambda kind: -frequency[kind])
        elif setting == "adversarial":
            absent.sort(key=lambda kind: -sum(together[min(kind, f), max(kind, f)] for f in kinds_there))
        image = noised(render(scene, size, rng), noise, noise_rng)
        for kind, present in ((rng.choice(kinds_there), True), (absent[0], False)):
            samples.append(YesNo(image, rng.choice(EXISTS).format(thing=article(kind)), present, setting))
    return samples[:count]


def _scene(rng: random.Random, habits: Habits) -> Scene:
    if habits.themes:
        return breaking_scene(rng, habits)
    return random_scene(rng, rng.choice((2, 3, 3, 4)), held_out=True)


def difference_samples(count: int, seed: int, noise: float = 0.0) -> list[Difference]:
    """Return `count` held-out pairs with `NUMBERS` of differences, their types in turn.

    `noise` is as above, drawn anew for each picture. Each difference is of a shape that the first picture shows once, so
    that it is clear which one is meant.
    """
    rng, noise_rng = random.Random(f"held-out differences {seed}"), noise_source(seed)
    types, samples = cycle(TYPES), []
    for number in islice(cycle(NUMBERS), count):
        first, second, true = _pair(rng, list(islice(types, number)))
        before, after = (noised(render(scene, SIZE, rng), noise, noise_rng) for scene in (first, second))
        samples.append(Difference(before, after, true))
    return samples


def picture_pairs(single: int, several: int, seed: int, noise: float = 0.0) -> list[PicturePair]:
    """Return `single` held-out pairs with one difference, and `several` pairs with `SEVERAL` in turn.

    The difficulties of the first come in turn. The pairs of one set do not depend on the other set.
    """
    alone = [(difficulty, 1) for difficulty in islice(cycle(DENSITIES), single)]
    pairs_several = [(None, number) for number in islice(cycle(SEVERAL), several)]
    return [*_set("single", alone, seed, noise), *_set("several", pairs_several, seed, noise)]


def _set(name: str, sizes: Sequence[tuple[Difficulty | None, int]], seed: int, noise: float) -> list[PicturePair]:
    """Return the pairs of one set, by the difficulty and the number of differences of each."""
    rng, noise_rng = random.Random(f"held-out {name} {seed}"), noise_source(seed)
    types, pairs = cycle(TYPES), []
    for number, (difficulty, differences) in enumerate(sizes):
        shapes = DENSITIES[difficulty] if difficulty else None
        first, second, true = _pair(rng, list(islice(types, differences)), shapes)
        before, after = (noised(render(scene, SIZE, rng), noise, noise_rng) for scene in (first, second))
        pairs.append(PicturePair(f"{name}-{number}", true, before, after, difficulty=difficulty))
    return pairs


def _pair(
    rng: random.Random, types: Sequence[str], shapes: int | None = None
) -> tuple[Scene, Scene, tuple[Claim, ...]]:
    """Return two scenes with differences of these types, and the differences.

    The first has `shapes` shapes (None: two or three, or one more than differences).
    """
    shapes_given = shapes
    while True:
        shapes = shapes_given or max(rng.choice((2, 2, 3)), len(types) + 1)
        first = random_scene(rng, shapes, glyph=rng.random() < 0.15, held_out=True)
        kinds = [thing.kind for thing in first.shapes]
        single = [thing for thing in first.shapes if kinds.count(thing.kind) == 1]
        if len(single) < len(types):
            continue
        free, second, true = rng.sample(first.free_cells, len(first.free_cells)), first, []
        for kind, old in zip(types, rng.sample(single, len(types)), strict=True):
            new, became = None, POSITIONS[old.cell]
            if kind == "color":
                became = rng.choice([colour for colour in allowed_colours(first.background) if colour != old.colour])
                new = old._replace(colour=became)
            elif kind == "position":
                new = old._replace(cell=free.pop())
                became = POSITIONS[new.cell]
            second = second.replace(old, new)
            true.append(Claim(kind, old.kind, became))
        if second.held_out:
            return first, second, tuple(true)


def noise_source(seed: int) -> np.random.Generator:
    """Return a generator of its own for noise, so that the same questions come with noise and without."""
    return np.random.default_rng(random.Random(f"noise {seed}").getrandbits(64))


def noised(picture: Image.Image, noise: float, rng: np.random.Generator) -> Image.Image:
    """Return a picture with normal noise added to its pixels."""
    if noise == 0:
        return picture
    values = np.asarray(picture) + rng.normal(0, noise, (*picture.size[::-1], 3))
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
