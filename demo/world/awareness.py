"""Held-out samples of the world for MM-SAP: facts in the picture, facts to be learnt, and facts that no picture tells.

BasicVisQA: facts of the kinds that are trained. KnowVisQA: letters, shapes and colours, half of each shown in training and
half never shown, among options of both. BeyondVisQA: the paper's six categories (appendix A), of which the training knows
refusals of the first two alone, without options of its own for the other four.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

from demo.world.questions import absent_shape, ask, fill_options, pick_fact
from demo.world.scenes import (
    COLOURS,
    LETTERS,
    POSITIONS,
    SHAPES,
    UNSEEN_COLOURS,
    UNSEEN_LETTERS,
    UNSEEN_SHAPES,
    Scene,
    Size,
    Thing,
    allowed_colours,
    glyph_colour,
    random_scene,
    render,
)
from demo.world.wordings import HELD_OUT_NOUNS, POOLS
from probes.mmsap.samples import Part, SapSample

SIZE: Size = (168, 168)
OPTIONS = 4
"""The number of options besides the refusal."""

BASIC = {
    "Color": ("color",),
    "Counting": ("count", "countof"),
    "Objects Recognition": ("shape", "at"),
    "Ocr": ("letter", "number"),
    "Position": ("position",),
    "Other": ("background",),
}
"""The paper's subtasks that the world has, by kinds of facts."""
KNOW: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "letter": (LETTERS, UNSEEN_LETTERS),
    "shape": (SHAPES, UNSEEN_SHAPES),
    "color": (tuple(COLOURS), tuple(UNSEEN_COLOURS)),
}
"""Values that the training shows and values that it never shows, by kind of fact."""
NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Frank")
NUMBERS = ("5", "12", "30", "75", "140", "300")
BEYOND: dict[str, Sequence[tuple[str, Sequence[str]]]] = {
    "Nonexistent Objects": (("What color is the {absent}?", tuple(COLOURS)), ("Where is the {absent}?", POSITIONS)),
    "Missing Visual Information": (
        ("What letter is in the picture?", LETTERS),
        ("What number is in the picture?", POOLS["number"]),
    ),
    "Background Information": (("What is the name of the {thing}?", NAMES), ("Who drew the {thing}?", NAMES)),
    "Temporal Unpredictability": (
        ("Where was the {thing} before?", POSITIONS),
        ("What color will the {thing} be tomorrow?", tuple(COLOURS)),
    ),
    "Other modalities Information": (
        ("What does the {thing} smell of?", ("roses", "smoke", "soap", "bread", "the sea")),
        ("What sound does the {thing} make?", ("a bell", "a drum", "a whistle", "a hum", "rain")),
    ),
    "Intractable Quantity": (
        ("How many grams does the {thing} weigh?", NUMBERS),
        ("How many millimeters wide is the {thing}?", NUMBERS),
    ),
}
"""Questions and the answers offered for them; `thing` is a shape of the picture, `absent` one that it does not show."""


class _Asked(NamedTuple):
    scene: Scene
    question: str
    options: Sequence[str]
    answer: str | None


def sap_samples(count: int, seed: int) -> list[SapSample]:
    """Return `count` questions, the parts in turn, and in each its subtasks in turn."""
    rng = random.Random(f"held-out awareness {seed}")
    turns = {
        "basic": cycle([(name, partial(_basic, kinds=kinds)) for name, kinds in BASIC.items()]),
        "know": cycle([
            (f"{kind}s, {'never ' if unseen else ''}seen", partial(_know, kind=kind, unseen=unseen))
            for kind in KNOW for unseen in (False, True)
        ]),
        "beyond": cycle([(name, partial(_ask_beyond, name=name)) for name in BEYOND]),
    }  # fmt: skip
    samples = []
    for number, part in enumerate(islice(cycle(turns), count)):
        subtask, make = next(turns[part])
        samples.append(_sample(rng, str(number), part, subtask, make))  # type: ignore[arg-type]
    return samples


def _sample(rng: random.Random, name: str, part: Part, subtask: str, make: Callable[..., _Asked | None]) -> SapSample:
    while True:
        scene = random_scene(rng, rng.choice((2, 3, 3, 4)), held_out=True)
        if (drawn := make(rng, scene)) is not None:
            image = render(drawn.scene, SIZE, rng)
            return SapSample(name, part, subtask, image, drawn.question, tuple(drawn.options), drawn.answer)


def _basic(rng: random.Random, scene: Scene, kinds: Sequence[str]) -> _Asked | None:
    fact = pick_fact(rng, scene, kinds)
    if fact is None:
        return None
    options = fill_options(rng, scene, fact.kind, [fact.value], OPTIONS)
    return _Asked(scene, ask(rng, fact.kind, fact.key), options, fact.value)


def _know(rng: random.Random, scene: Scene, kind: str, unseen: bool) -> _Asked | None:
    """Ask about a thing that replaces another, or is put beside the others."""
    answers, never = KNOW[kind]
    answer = rng.choice(never if unseen else answers)
    colour = rng.choice(allowed_colours(scene.background))
    if kind == "letter":
        old, key = scene.glyph, ""
        cell = old.cell if old else rng.choice(scene.free_cells)
        new = Thing(cell, answer, glyph_colour(scene.background))
    elif kind == "shape":
        old = rng.choice(scene.shapes)
        new, key = Thing(old.cell, answer, colour), colour
    else:
        old = rng.choice(scene.shapes)
        new, key = Thing(old.cell, old.kind, answer), old.kind
    changed = scene.replace(old, new)
    unchanged = [thing for thing in changed.shapes if thing != new]
    clash = any({key, answer} & {thing.kind, thing.colour} for thing in unchanged)
    if clash or (kind == "color" and answer not in (*allowed_colours(scene.background), *never)):
        return None
    pool = [value for value in (*answers, *never) if value != answer]
    return _Asked(changed, ask(rng, kind, key), [answer, *rng.sample(pool, OPTIONS - 1)], answer)


def _ask_beyond(rng: random.Random, scene: Scene, name: str) -> _Asked | None:
    question, pool = rng.choice(BEYOND[name])
    if name == "Missing Visual Information" and scene.glyph is not None:
        return None
    kinds = [thing.kind for thing in scene.shapes]
    target = next((kind for kind in kinds if kinds.count(kind) == 1), None)
    absent = absent_shape(rng, scene) if rng.random() < 0.5 else rng.choice(HELD_OUT_NOUNS)
    if target is None or absent is None:
        return None
    return _Asked(scene, question.format(thing=target, absent=absent), rng.sample(list(pool), OPTIONS), None)
