"""Questions about one picture: true statements, options, refusals, and a maker for every type.

A maker takes a random generator and a scene and returns a `Question`, or None where the scene does not offer one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo.world.scenes import COLOURS, POSITIONS, SHAPES, Fact, Scene, facts
from demo.world.wordings import (
    ASK,
    BY_LETTER,
    DESCRIBE,
    EXISTS,
    FACT_KINDS,
    IN_FULL,
    NOTHING,
    NOUNS,
    OPTION_LETTERS,
    OR_REFUSE,
    PICK_KINDS,
    POOLS,
    REFUSAL,
    SELECT,
    UNTOLD,
    WITH_REASON,
)


@dataclass(frozen=True)
class SceneQuestion:
    """A user's questions and right answers, turn by turn.

    Places to look at, as far as they are known (all from 0), are only used to supervise attention: `target` is the picture
    asked about where there are several, `cell` the cell of the picture that the question is about, `spans` cuts the answer
    into pieces with a cell each, `pair_cells` are the cells of the first and of the second picture that a difference is
    about. `said` and `pick` are offsets in the first user text: the end of the value that the context claims, and the end of
    the right option. `instructed` is the end of the instruction there and the side it names.
    """

    kind: str
    turns: tuple[tuple[str, str], ...]
    target: int | None = None
    cell: int | None = None
    spans: tuple[tuple[str, int | None], ...] | None = None
    pair_cells: tuple[int, int] | None = None
    said: int | None = None
    pick: int | None = None
    instructed: tuple[int, str] | None = None


def article(words: str) -> str:
    """Return the words with an indefinite article."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def statement(kind: str, key: str, value: str) -> str:
    """Return the sentence that states a fact; also the answer to the open question about it."""
    match kind:
        case "color":
            return f"The {key} is {value}."
        case "shape":
            return f"The {key} object is {article(value)}."
        case "position":
            return f"The {key} is at the {value}."
        case "at":
            return f"There is {article(value)} at the {key}."
        case "background":
            return f"The background is {value}."
        case "count" | "countof":
            noun = key or "shape"
            return f"There is 1 {noun}." if value == "1" else f"There are {value} {noun}s."
        case "letter" | "number":
            return f"The {kind} is {value}."
    raise ValueError(f"kind {kind!r}: expected one of {FACT_KINDS}")


def ask(rng: random.Random, kind: str, key: str) -> str:
    """Return an open question about a fact, in a random wording."""
    return rng.choice(ASK[kind]).format(key=key)


def pick_fact(rng: random.Random, scene: Scene, kinds: Sequence[str]) -> Fact | None:
    """Draw a fact of one of the kinds; a kind named twice is twice as likely, kinds the scene lacks are left out."""
    all_facts = facts(scene)
    kinds_present = {fact.kind for fact in all_facts}
    possible = [kind for kind in kinds if kind in kinds_present]
    if not possible:
        return None
    kind = rng.choice(possible)
    return rng.choice([fact for fact in all_facts if fact.kind == kind])


def alternative(rng: random.Random, scene: Scene | None, kind: str, value: str) -> str:
    """Return a wrong value for a fact; four times in ten that of another thing of the scene, if it has one."""
    if scene is not None and rng.random() < 0.4:
        near = {
            "color": [t.colour for t in scene.shapes],
            "shape": [t.kind for t in scene.shapes],
            "position": [POSITIONS[t.cell] for t in scene.things],
            "at": [f"{t.colour} {t.kind}" for t in scene.shapes],
        }.get(kind, [])
        if near := [candidate for candidate in near if candidate != value]:
            return rng.choice(near)
    return rng.choice([candidate for candidate in POOLS[kind] if candidate != value])


def fill_options(rng: random.Random, scene: Scene | None, kind: str, options: list[str], count: int) -> list[str]:
    """Add wrong values until there are `count` options, then shuffle; the first option is the right one."""
    options = list(options)
    while len(options) < count:
        option = alternative(rng, scene, kind, options[0])
        if option not in options:
            options.append(option)
    rng.shuffle(options)
    return options


def letters_of(count: int) -> str:
    """Return 'A or B', 'A, B or C', ..."""
    return ", ".join(OPTION_LETTERS[: count - 1]) + f" or {OPTION_LETTERS[count - 1]}"


def option_text(question: str, options: Sequence[str], tail: str = SELECT) -> str:
    """Return the question, a line per option, and how to answer: the form of MC2 (modality-preference paper, section 3)."""
    lines = [f"{letter}. {option}" for letter, option in zip(OPTION_LETTERS, options, strict=False)]
    return "\n".join([question, *lines, tail.format(letters=letters_of(len(options)))])


def option_question(
    rng: random.Random, question: str, options: Sequence[str], answer: str, reason: str | None = None
) -> tuple[str, str]:
    """Return user text and answer of a question with options; `reason` allows the form that explains first."""
    letter = OPTION_LETTERS[list(options).index(answer)]
    draw = rng.random()
    if reason is not None and draw < 0.12:
        return option_text(question, options, rng.choice(WITH_REASON)), f"{reason[:-1]} {letter}"
    if draw < 0.27:
        return option_text(question, options, rng.choice(IN_FULL)), f"{letter}. {answer}"
    tail = SELECT if draw < 0.75 else rng.choice((*BY_LETTER, OR_REFUSE))
    return option_text(question, options, tail), letter


def end_of_option(text: str, option: str) -> int:
    """Return the end of an option's line in a user text."""
    match = re.search(rf"\n[A-E]\. {re.escape(option)}\n", text)
    if match is None:
        raise ValueError(f"no option {option!r} in {text!r}")
    return match.end() - 1


def end_of_value(text: str, words: str, value: str) -> int:
    """Return the end of the value in the sentence `words` in a user text."""
    return text.index(words) + words.rindex(value) + len(value)


def describe(scene: Scene) -> str:
    """Return the description of a scene: its things cell by cell, then the background."""
    return "".join(text for text, _ in describe_spans(scene))


def describe_spans(scene: Scene) -> tuple[tuple[str, int | None], ...]:
    """Return the description in pieces, each with the cell that it is about (None for the background)."""
    spans: list[tuple[str, int | None]] = []
    for i, thing in enumerate(scene.things):
        word = "letter" if thing.kind.isalpha() else "number"
        label = f"the {word} {thing.kind}" if thing.is_glyph else article(f"{thing.colour} {thing.kind}")
        before = "" if i == 0 else " and " if i == len(scene.things) - 1 else ", "
        text = f"{before}{label} at the {POSITIONS[thing.cell]}"
        spans.append((text if i else text[0].upper() + text[1:], thing.cell))
    return (*spans, (f" on {article(scene.background)} background.", None))


def absent_shape(rng: random.Random, scene: Scene, kinds: Sequence[str] = SHAPES) -> str | None:
    """Draw a shape, or one of other kinds of things, that the scene does not show, None where it shows all."""
    kinds_present = {thing.kind for thing in scene.shapes}
    missing = [shape for shape in kinds if shape not in kinds_present]
    return rng.choice(missing) if missing else None


# ------------------------------------------------------------------------------------------------- the makers


def open_question(rng: random.Random, scene: Scene, kind: str) -> SceneQuestion | None:
    """Return a question about a fact of the kind, answered with its statement."""
    fact = pick_fact(rng, scene, (kind,))
    if fact is None:
        return None
    return SceneQuestion(kind, ((ask(rng, kind, fact.key), statement(*fact[:3])),), cell=fact.cell)


def empty(rng: random.Random, scene: Scene) -> SceneQuestion:
    """Return a question about a cell where nothing is."""
    cell = rng.choice(scene.free_cells)
    key = POSITIONS[cell]
    return SceneQuestion("empty", ((ask(rng, "at", key), NOTHING.format(key=key)),), cell=cell)


def description(rng: random.Random, scene: Scene) -> SceneQuestion:
    """Return a question for a description of the scene."""
    return SceneQuestion("describe", ((rng.choice(DESCRIBE), describe(scene)),), spans=describe_spans(scene))


def unanswerable(rng: random.Random, scene: Scene, nouns: Sequence[str] = NOUNS) -> str | None:
    """Return a question that the picture does not answer: about a shape or noun that is not there, or a missing glyph."""
    draw = rng.random()
    if draw < 0.5:
        key = absent_shape(rng, scene)
    elif draw < 0.85:
        key = rng.choice(nouns)
    elif draw < 0.93:
        missing = [c for c in COLOURS if all(c != t.colour for t in scene.shapes)]
        return ask(rng, "shape", rng.choice(missing))
    else:
        glyph = scene.glyph
        kinds = [k for k in ("letter", "number") if glyph is None or (k == "letter") != glyph.kind.isalpha()]
        return ask(rng, rng.choice(kinds), "")
    return ask(rng, rng.choice(("color", "color", "position")), key) if key else None


def refusal(rng: random.Random, scene: Scene, nouns: Sequence[str] = NOUNS) -> SceneQuestion | None:
    """Return an unanswerable question with a refusal as its answer."""
    text = unanswerable(rng, scene, nouns)
    return SceneQuestion("refuse", ((text, REFUSAL),)) if text else None


def refusal_option(rng: random.Random, scene: Scene) -> SceneQuestion | None:
    """Return an unanswerable question with options: the refusal is one of them, or the prompt asks for it (MM-SAP)."""
    key = absent_shape(rng, scene) if rng.random() < 0.5 else rng.choice(NOUNS)
    if key is None:
        return None
    kind = rng.choice(("color", "position"))
    if rng.random() < 0.3:
        choices = rng.sample(POOLS[kind], rng.choice((2, 3, 4)))
        return SceneQuestion("refuse_option", ((option_text(ask(rng, kind, key), choices, OR_REFUSE), REFUSAL),))
    options = [*rng.sample(POOLS[kind], rng.choice((1, 2, 3))), REFUSAL[:-1]]
    if rng.random() < 0.3:
        rng.shuffle(options)
    turn = option_question(rng, ask(rng, kind, key), options, REFUSAL[:-1])
    return SceneQuestion("refuse_option", (turn,), pick=end_of_option(turn[0], REFUSAL[:-1]))


def calibrated(rng: random.Random, scene: Scene) -> SceneQuestion | None:
    """Return a question with four options and the refusal in any order: about a fact, or something that no picture tells."""
    kinds = [kind for kind in PICK_KINDS if len(POOLS[kind]) >= 4]
    fact = pick_fact(rng, scene, kinds)
    if fact is None:
        return None
    if rng.random() < 0.5:
        text, answer = ask(rng, fact.kind, fact.key), fact.value
        options = fill_options(rng, scene, fact.kind, [answer], 4)
    else:
        key = absent_shape(rng, scene) if rng.random() < 0.3 else None
        text = ask(rng, "color", key) if key else rng.choice(UNTOLD).format(key=rng.choice(scene.shapes).kind)
        options, answer = rng.sample(POOLS[rng.choice(kinds)], 4), REFUSAL[:-1]
    options = rng.sample([*options, REFUSAL[:-1]], 5)
    turn = option_text(text, options, BY_LETTER[1]), OPTION_LETTERS[options.index(answer)]
    return SceneQuestion("calibrated", (turn,), pick=end_of_option(turn[0], answer))


def existence(
    rng: random.Random,
    scene: Scene,
    yes: float = 0.45,
    kinds: Sequence[str] = SHAPES,
    nouns: Sequence[str] = NOUNS,
) -> SceneQuestion | None:
    """Return a question about the existence of a shape or noun.

    In `yes` of the questions it is a shape that is there; otherwise one of the `kinds` that is not, or a noun, which never
    is, if there are `nouns`.
    """
    draw = rng.random()
    if draw < yes and scene.shapes:
        thing = rng.choice(scene.shapes)
        answer = f"Yes, there is {article(thing.kind)}."
        return SceneQuestion(
            "exists", ((rng.choice(EXISTS).format(thing=article(thing.kind)), answer),), cell=thing.cell
        )
    named = draw >= yes + (1 - yes) * 7 / 11 and nouns
    key = rng.choice(nouns) if named else absent_shape(rng, scene, kinds)
    return (
        SceneQuestion("exists", ((rng.choice(EXISTS).format(thing=article(key)), "No, there is not."),))
        if key
        else None
    )


def lookup(rng: random.Random, name: str = "lookup") -> SceneQuestion:
    """Return options without a picture: which letter stands for a word, and which word for a letter.

    `name` is lookup (answered by the letter), lookup_reason (the word first) or lookup_word (the letter is given).
    """
    kind = rng.choice(("color", "shape", "position", "number", "background", "letter", "at"))
    choices = rng.sample(POOLS[kind], rng.choice((2, 2, 3, 4, 5)))
    answer = rng.choice(choices)
    letter = OPTION_LETTERS[choices.index(answer)]
    if name == "lookup_word":
        text = option_text(f"What is option {letter}?", choices, rng.choice(IN_FULL))
        return SceneQuestion(name, ((text, f"{letter}. {answer}"),), pick=end_of_option(text, answer))
    question = rng.choice((f"Which option is {answer}?", f"Choose {answer}."))
    if name == "lookup_reason":
        text = option_text(question, choices, rng.choice(WITH_REASON))
        return SceneQuestion(name, ((text, f"It is {answer} {letter}"),), pick=end_of_option(text, answer))
    text = option_text(question, choices, SELECT if rng.random() < 0.6 else rng.choice(BY_LETTER))
    return SceneQuestion(name, ((text, letter),), pick=end_of_option(text, answer))


def options(rng: random.Random, scene: Scene, count: int) -> SceneQuestion | None:
    """Return a fact asked with `count` options; now and then the last one is the refusal, which is then wrong."""
    fact = pick_fact(rng, scene, PICK_KINDS)
    if fact is None:
        return None
    count = min(count, len(POOLS[fact.kind]))
    refuse = count > 2 and rng.random() < 0.2
    choices = fill_options(rng, scene, fact.kind, [fact.value], count - refuse) + [REFUSAL[:-1]] * refuse
    turn = option_question(rng, ask(rng, fact.kind, fact.key), choices, fact.value, statement(*fact[:3]))
    name = "options" if count == 2 else "options_more"
    return SceneQuestion(name, (turn,), cell=fact.cell, pick=end_of_option(turn[0], fact.value))


def several_turns(
    rng: random.Random, scene: Scene, makers: Sequence[Callable[..., SceneQuestion | None]]
) -> SceneQuestion:
    """Return two or three questions in one conversation."""
    turns: list[tuple[str, str]] = []
    while len(turns) < 2 or (len(turns) < 3 and rng.random() < 0.4):
        question = rng.choice(makers)(rng, scene)
        if question is not None:
            turns += question.turns
    return SceneQuestion("turns", tuple(turns))
