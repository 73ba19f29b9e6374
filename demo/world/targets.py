"""Held-out samples of the world for attention accuracy: two to four pictures, one of which holds the answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from demo.world.faithfulness import SIZE, noise_source, noised
from demo.world.questions import ask, fill_options, option_text, pick_fact, statement
from demo.world.scenes import Fact, Scene, random_scene, render
from demo.world.several import in_picture, related_scenes, which_picture
from probes.stme.samples import ANCHOR, CAPTION, NEEDLE, TargetSample

MOST = 4
"""The maximum number of pictures of a sample; samples have two to four, in turn."""
SHAPES = (1, 2, 2, 3)
KINDS = ("color", "shape", "position", "background", "count")
OPTIONS = 3
LIKE = "Which picture is most like picture {last}?"

TargetQuestion = tuple[Sequence[Scene], int, str, str, tuple[str, ...], int | None]
"""A question about several scenes.

It is the scenes, the target's number (from 0), the question, the right answer, the options' texts, and the cell of the
target that holds the answer, where it is a single one.
"""


def target_samples(count: int, seed: int, noise: float = 0.0) -> list[TargetSample]:
    """Return `count` samples, the tasks in turn.

    `noise` is the standard deviation of the noise added to every pixel's values of 0 to 255, drawn anew for each picture.
    """
    return list(islice(targets(seed, noise), count))


def targets(seed: int, noise: float = 0.0) -> Iterator[TargetSample]:
    """Yield the samples of `target_samples`, one after the other without end."""
    rng, noise_rng = random.Random(f"held-out targets {seed}"), noise_source(seed)
    makers, number = list(MAKERS.items()), 0
    while True:
        task, maker = makers[number % len(makers)]
        made_sample = maker(rng, 2 + number // len(makers) % (MOST - 1))
        if made_sample is None:
            continue
        scenes, target, question, response, choices, cell = made_sample
        images = tuple(noised(render(scene, SIZE, rng), noise, noise_rng) for scene in scenes)
        texts = ("",) * len(images) + (question,)
        spot = None if cell is None else _box(cell)
        yield TargetSample(f"{task}-{number}", task, texts, images, target + 1, response, choices, spot=spot)
        number += 1


def _box(cell: int) -> tuple[float, float, float, float]:
    row, column = divmod(cell, 3)
    return column / 3, row / 3, (column + 1) / 3, (row + 1) / 3


def _caption(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask which picture shows something that only one of them shows."""
    scenes = related_scenes(rng, pictures, SHAPES, held_out=True)
    question = which_picture(rng, scenes)
    if question is None or question.target is None:
        return None
    return scenes, question.target, question.turns[0][0], str(question.target + 1), (), question.cell


def _facts(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask about a fact of a picture that is named by its number."""
    scenes, target, fact = _one_of(rng, pictures, KINDS)
    return fact and (scenes, target, _ask(rng, fact, target), statement(*fact[:3]), (), fact.cell)


def _options(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask about a fact with options, which are answered by a letter."""
    scenes, target, fact = _one_of(rng, pictures, KINDS)
    if fact is None:
        return None
    choices = fill_options(rng, scenes[target], fact.kind, [fact.value], OPTIONS)
    return scenes, target, option_text(_ask(rng, fact, target), choices), fact.value, tuple(choices), fact.cell


def _one_of(rng: random.Random, pictures: int, kinds: Sequence[str]) -> tuple[list[Scene], int, Fact | None]:
    """Return scenes, the number of one of them, and a fact of it."""
    scenes = related_scenes(rng, pictures, SHAPES, held_out=True)
    target = rng.randrange(pictures)
    return scenes, target, pick_fact(rng, scenes[target], kinds)


def _ask(rng: random.Random, fact: Fact, target: int) -> str:
    return in_picture(rng, ask(rng, fact.kind, fact.key), f"picture {target + 1}")


def _ask_of_all(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask for the colour or the place of a shape that only one picture shows, without naming the picture."""
    scenes, target, fact = _one_of(rng, pictures, ("color", "position"))
    if fact is None or any(thing.kind == fact.key for i, s in enumerate(scenes) if i != target for thing in s.shapes):
        return None
    return scenes, target, ask(rng, fact.kind, fact.key), statement(*fact[:3]), (), fact.cell


def _needle(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask for a digit that one of the pictures holds, without naming the picture."""
    scenes = [random_scene(rng, rng.choice(SHAPES), glyph=False, held_out=True) for _ in range(pictures)]
    target = rng.randrange(pictures)
    scenes[target] = random_scene(rng, rng.choice(SHAPES), glyph=True, held_out=True)
    glyph = scenes[target].glyph
    if glyph is None or not glyph.kind.isdigit():
        return None
    return scenes, target, ask(rng, "number", ""), glyph.kind, (), glyph.cell


def _anchor(rng: random.Random, pictures: int) -> TargetQuestion | None:
    """Ask with a last picture that shows the scene of the target once more, drawn anew."""
    scenes = related_scenes(rng, max(2, pictures - 1), SHAPES, held_out=True)
    target = rng.randrange(len(scenes))
    if scenes.count(scenes[target]) > 1:
        return None
    question = LIKE.format(last=len(scenes) + 1)
    return [*scenes, scenes[target]], target, question, str(target + 1), (), None


MAKERS: dict[str, Callable[[random.Random, int], TargetQuestion | None]] = {
    CAPTION: _caption, "facts": _facts, NEEDLE: _needle, "options": _options, "found": _ask_of_all, ANCHOR: _anchor,
}  # fmt: skip
