"""Held-out samples of the world in the forms of MME, PhD, TallyQA and CHAIR.

They are pairs of questions, questions beside a text, questions for a number, and pictures to describe. The embedded model
was trained on yes and no about existence alone; the other kinds of such questions are new to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import cycle, islice
from typing import NamedTuple

from demo.world.faithfulness import SIZE, noise_source, noised
from demo.world.questions import absent_shape, alternative, article, ask, pick_fact, statement
from demo.world.scenes import EVEN, POSITIONS, SHAPES, Habits, Scene, breaking_scene, random_scene, render
from demo.world.wordings import DESCRIBE
from probes.chair.samples import Described
from probes.chair.words import Vocabulary
from probes.mme.samples import MmePair
from probes.phd.samples import MODES, Mode, PhdSample
from probes.tallyqa.task import Counted

SUBTASKS = ("existence", "count", "position", "color", "OCR")
"""The subtasks of MME that the world has."""
_KINDS = {"count": ("count",), "position": ("position",), "color": ("color",), "OCR": ("letter", "number")}
_FORMS: dict[str, Callable[[str, str], str]] = {
    "count": lambda key, value: "Is there 1 shape?" if value == "1" else f"Are there {value} shapes?",
    "position": lambda key, value: f"Is the {key} at the {value}?",
    "color": lambda key, value: f"Is the {key} {value}?",
    "letter": lambda key, value: f"Is the letter {value}?",
    "number": lambda key, value: f"Is the number {value}?",
}


class _Asked(NamedTuple):
    """A scene, a question for yes and one for no, and by the right answer a sentence that contradicts it."""

    scene: Scene
    yes: str
    no: str
    against: Mapping[bool, str]


def _draw_questions(rng: random.Random, subtask: str) -> _Asked:
    """Draw scenes until one has the facts that the subtask needs."""
    while True:
        scene = scene_of(rng, glyph=True if subtask == "OCR" else None)
        if subtask == "existence":
            present, missing = rng.choice(scene.shapes), absent_shape(rng, scene)
            if missing is not None:
                yes, no = (f"Is there {article(kind)} in the picture?" for kind in (present.kind, missing))
                claimed, cells = f"{present.colour} {missing}", (present.cell, rng.choice(scene.free_cells))
                replaced, added = (statement("at", POSITIONS[cell], claimed) for cell in cells)
                return _Asked(scene, yes, no, {True: replaced, False: added})
        elif fact := pick_fact(rng, scene, _KINDS[subtask]):
            other_value = alternative(rng, scene, fact.kind, fact.value)
            yes, no = (_FORMS[fact.kind](fact.key, value) for value in (fact.value, other_value))
            return _Asked(scene, yes, no, dict.fromkeys((True, False), statement(fact.kind, fact.key, other_value)))


def scene_of(rng: random.Random, habits: Habits = EVEN, glyph: bool | None = None) -> Scene:
    """Return a held-out scene, which breaks the habits of a world that has any."""
    if habits.themes:
        return breaking_scene(rng, habits)
    return random_scene(rng, rng.choice((2, 3, 3, 4)), glyph=glyph, held_out=True)


def mme_pairs(count: int, seed: int, noise: float = 0.0) -> list[MmePair]:
    """Return `count` pictures with a question for yes and one for no each, the subtasks in turn."""
    rng, noise_rng = random.Random(f"held-out pairs of questions {seed}"), noise_source(seed)
    pairs = []
    for subtask in islice(cycle(SUBTASKS), count):
        content = _draw_questions(rng, subtask)
        image = noised(render(content.scene, SIZE, rng), noise, noise_rng)
        pairs.append(MmePair(image, ((content.yes, True), (content.no, False)), subtask))
    return pairs


def phd_samples(count: int, seed: int, noise: float = 0.0) -> list[PhdSample]:
    """Return `count` questions whether a shape is there, in turn for yes and for no.

    Each is asked plainly, beside a sentence about something else (iac) and beside one that contradicts the answer (icc).
    """
    rng, noise_rng = random.Random(f"held-out texts {seed}"), noise_source(seed)
    samples: list[PhdSample] = []
    per_sample = 2 * len(MODES)
    for _ in range(-(-count // per_sample)):
        content = _draw_questions(rng, "existence")
        image = noised(render(content.scene, SIZE, rng), noise, noise_rng)
        beside = statement("background", "", content.scene.background)
        for question, present in ((content.yes, True), (content.no, False)):
            texts: dict[Mode, str] = {"base": "", "iac": beside, "icc": content.against[present]}
            for mode, text in texts.items():
                question_text = f"Text context: {text}\n{question}" if text else question
                samples.append(PhdSample(image, question_text, present, "object recognition", mode))
    return samples[:count]


def counted_samples(count: int, seed: int, noise: float = 0.0) -> list[Counted]:
    """Return `count` questions for a number, in turn of all shapes (simple) and of those of a kind."""
    rng, noise_rng = random.Random(f"held-out numbers {seed}"), noise_source(seed)
    samples = []
    for kind in islice(cycle(("count", "countof")), count):
        scene = scene_of(rng)
        fact = pick_fact(rng, scene, (kind,))
        assert fact is not None
        image = noised(render(scene, SIZE, rng), noise, noise_rng)
        samples.append(Counted(image, ask(rng, kind, fact.key), int(fact.value), kind == "count"))
    return samples


def described(count: int, seed: int, noise: float = 0.0, habits: Habits = EVEN) -> list[Described]:
    """Return `count` pictures to describe; their objects are the kinds of shapes."""
    rng, noise_rng = random.Random(f"held-out descriptions {seed}"), noise_source(seed)
    vocabulary = Vocabulary.of([kind] for kind in SHAPES)
    samples = []
    for _ in range(count):
        scene = scene_of(rng, habits)
        image = noised(render(scene, SIZE, rng), noise, noise_rng)
        kinds = frozenset(thing.kind for thing in scene.shapes)
        samples.append(Described(image, kinds, vocabulary, DESCRIBE[0]))
    return samples
