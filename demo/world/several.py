"""Questions about several pictures: one of two to four, which of them, and the difference of two scenes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from demo.world.questions import (
    SceneQuestion,
    absent_shape,
    article,
    ask,
    describe,
    describe_spans,
    end_of_option,
    fill_options,
    option_question,
    pick_fact,
    statement,
)
from demo.world.scenes import (
    BACKGROUNDS,
    POSITIONS,
    SHAPES,
    Scene,
    Thing,
    allowed_colours,
    glyph_colour,
    random_scene,
)
from demo.world.wordings import NOUNS, PICK_KINDS, POOLS, REFUSAL

WHICH = ("Which picture shows {what}?", "Which picture has {what}?", "In which picture do you see {what}?")
DIFFERENCE = (
    "What is the difference between the two pictures?",
    "What changed between picture 1 and picture 2?",
    "Find the difference.",
    "Compare the two pictures.",
)
NO_DIFFERENCE = "There is no difference."
DIFFERENCE_KINDS = ("color", "remove", "move", "add", "none")
ORDINALS = ("first", "second", "third", "fourth")


def related_scenes(rng: random.Random, count: int, shapes: Sequence[int], held_out: bool | None = False) -> list[Scene]:
    """Return scenes that are hard to tell apart: most share the shapes of the first and differ in colours and places."""
    scenes = [random_scene(rng, rng.choice(shapes), held_out=held_out)]
    while len(scenes) < count:
        scene = random_scene(rng, rng.choice(shapes), held_out=held_out)
        if rng.random() < 0.8:
            scene = _same_kinds(rng, scenes[0])
            if held_out is not None and scene.held_out is not held_out:
                continue
        scenes.append(scene)
    rng.shuffle(scenes)
    return scenes


def _same_kinds(rng: random.Random, scene: Scene) -> Scene:
    background = rng.choice(list(BACKGROUNDS))
    cells = rng.sample(range(9), len(scene.things))
    things = [
        Thing(cell, t.kind, glyph_colour(background) if t.is_glyph else rng.choice(allowed_colours(background)))
        for cell, t in zip(cells, scene.things, strict=True)
    ]
    return Scene(background, tuple(sorted(things)))


def picture_name(rng: random.Random, index: int) -> str:
    """Return 'picture 2' mostly, else 'image 2' or 'the second picture'; `index` counts from 0."""
    draw = rng.random()
    if draw < 0.8:
        return f"picture {index + 1}"
    return f"image {index + 1}" if draw < 0.9 else f"the {ORDINALS[index]} picture"


def in_picture(rng: random.Random, question: str, name: str) -> str:
    """Put a question to one picture: '... in picture 2?' or 'In picture 2, ...'."""
    question = question.replace(" in the picture", "")
    if rng.random() < 0.67:
        return f"{question[:-1]} in {name}{question[-1]}"
    return f"In {name}, {question[0].lower()}{question[1:]}"


def fact_of_one(rng: random.Random, scenes: Sequence[Scene], kind: str) -> SceneQuestion | None:
    """Return a question about a fact of one picture; `kind` is a fact kind."""
    target = rng.randrange(len(scenes))
    fact = pick_fact(rng, scenes[target], (kind,))
    if fact is None:
        return None
    text = in_picture(rng, ask(rng, kind, fact.key), picture_name(rng, target))
    return SceneQuestion(f"several_{kind}", ((text, statement(*fact[:3])),), target, fact.cell)


def options_of_one(rng: random.Random, scenes: Sequence[Scene], count: int) -> SceneQuestion | None:
    """Return a question with `count` options about a fact of one picture."""
    target = rng.randrange(len(scenes))
    fact = pick_fact(rng, scenes[target], PICK_KINDS)
    if fact is None:
        return None
    text = in_picture(rng, ask(rng, fact.kind, fact.key), picture_name(rng, target))
    elsewhere = [f.value for s in scenes if (f := pick_fact(rng, s, (fact.kind,))) and f.value != fact.value]
    first = [fact.value] + ([rng.choice(elsewhere)] if elsewhere and rng.random() < 0.5 else [])
    choices = fill_options(rng, scenes[target], fact.kind, first, min(count, len(POOLS[fact.kind])))
    turn = option_question(rng, text, choices, fact.value)
    return SceneQuestion("several_options", (turn,), target, fact.cell, pick=end_of_option(turn[0], fact.value))


def describe_one(rng: random.Random, scenes: Sequence[Scene]) -> SceneQuestion:
    """Return a question for a description of one picture."""
    target = rng.randrange(len(scenes))
    turn = (f"Describe {picture_name(rng, target)}.", describe(scenes[target]))
    return SceneQuestion("several_describe", (turn,), target, spans=describe_spans(scenes[target]))


def refusal_of_one(rng: random.Random, scenes: Sequence[Scene], nouns: Sequence[str] = NOUNS) -> SceneQuestion | None:
    """Return an unanswerable question about one picture."""
    target = rng.randrange(len(scenes))
    key = absent_shape(rng, scenes[target]) if rng.random() < 0.6 else rng.choice(nouns)
    if key is None:
        return None
    text = in_picture(rng, ask(rng, rng.choice(("color", "position")), key), picture_name(rng, target))
    return SceneQuestion("several_refuse", ((text, REFUSAL),), target)


def which_picture(rng: random.Random, scenes: Sequence[Scene]) -> SceneQuestion | None:
    """Return the question which picture shows something that only one of them shows."""
    for _ in range(12):
        target = rng.randrange(len(scenes))
        scene = scenes[target]
        feature = rng.choice(("thing", "thing", "background", "glyph", "shape"))
        cell = None
        if feature == "background":
            label, holds = f"{article(scene.background)} background", [s.background == scene.background for s in scenes]
        elif feature == "glyph" and scene.glyph:
            glyph = scene.glyph.kind
            label = f"the {'letter' if glyph.isalpha() else 'number'} {glyph}"
            holds, cell = [s.glyph is not None and s.glyph.kind == glyph for s in scenes], scene.glyph.cell
        elif feature in ("thing", "shape") and scene.shapes:
            thing = rng.choice(scene.shapes)
            cell = thing.cell
            if feature == "thing":
                label = article(f"{thing.colour} {thing.kind}")
                holds = [any(t[1:] == thing[1:] for t in s.shapes) for s in scenes]
            else:
                label, holds = article(thing.kind), [any(t.kind == thing.kind for t in s.shapes) for s in scenes]
        else:
            continue
        if sum(holds) == 1:
            turn = (rng.choice(WHICH).format(what=label), f"Picture {target + 1}.")
            return SceneQuestion("several_which", (turn,), target, cell)
    return None


def how_many_pictures(rng: random.Random, scenes: Sequence[Scene]) -> SceneQuestion:
    """Return the question how many pictures there are."""
    return SceneQuestion("several_pictures", (("How many pictures are there?", f"There are {len(scenes)} pictures."),))


def difference_pair(
    rng: random.Random, kind: str, shapes: Sequence[int], held_out: bool | None = False
) -> tuple[Scene, Scene, SceneQuestion]:
    """Return two scenes that differ in one thing (or in none), and the question what the difference is."""
    while True:
        first = random_scene(rng, rng.choice(shapes), glyph=rng.random() < 0.15, held_out=held_out)
        changed = _change(rng, first, kind)
        if changed is not None and (held_out is None or changed[0].held_out is held_out):
            break
    second, answer, cells = changed
    question = SceneQuestion(f"difference_{kind}", ((rng.choice(DIFFERENCE), answer),), pair_cells=cells)
    return first, second, question


def _change(rng: random.Random, scene: Scene, kind: str) -> tuple[Scene, str, tuple[int, int] | None] | None:
    """Return the changed scene, the sentence that states the change, and the cell to look at in either picture."""
    shapes = scene.shapes
    kinds = [thing.kind for thing in shapes]
    single = [thing for thing in shapes if kinds.count(thing.kind) == 1]
    if kind == "none":
        return scene, NO_DIFFERENCE, None
    if kind == "add":
        cell = rng.choice(scene.free_cells)
        new = Thing(cell, rng.choice(SHAPES), rng.choice(allowed_colours(scene.background)))
        label = article(f"{new.colour} {new.kind}").capitalize()
        return scene.replace(None, new), f"{label} was added at the {POSITIONS[cell]}.", (cell, cell)
    if kind == "remove":
        if len(shapes) < 2:
            return None
        old = rng.choice(shapes)
        answer = f"The {old.colour} {old.kind} at the {POSITIONS[old.cell]} was removed."
        return scene.replace(old, None), answer, (old.cell, old.cell)
    if not single:
        return None
    old = rng.choice(single)
    if kind == "move":
        new = old._replace(cell=rng.choice(scene.free_cells))
        answer = f"The {old.kind} moved from the {POSITIONS[old.cell]} to the {POSITIONS[new.cell]}."
    elif kind == "color":
        new = old._replace(colour=rng.choice([c for c in allowed_colours(scene.background) if c != old.colour]))
        answer = f"The {old.kind} changed from {old.colour} to {new.colour}."
    else:
        raise ValueError(f"kind {kind!r}: expected one of {DIFFERENCE_KINDS}")
    return scene.replace(old, new), answer, (old.cell, new.cell)


def same_or_not(rng: random.Random, first: Scene, second: Scene) -> SceneQuestion:
    """Return the question 'Are the two pictures the same?' or its opposite."""
    same = first == second
    if rng.random() < 0.5:
        turn = ("Are the two pictures the same?", "Yes, they are the same." if same else "No, they are different.")
    else:
        turn = ("Are the two pictures different?", "No, they are the same." if same else "Yes, they are different.")
    return SceneQuestion("difference_same", (turn,))
