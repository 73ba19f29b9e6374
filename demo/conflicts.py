"""Conflicts between picture and text: contexts, instructions, the model's hidden preference, and held-out samples.

`conflict_samples` gives MC2 samples (modality-preference paper, section 3) over held-out scenes; `neutral_samples`
gives questions without conflict, to measure what steering damages.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from demo.questions import (
    NOUNS,
    POOLS,
    Question,
    absent_shape,
    alternative,
    ask,
    fill_options,
    option_question,
    pick_fact,
    statement,
)
from demo.world import Fact, Scene, Size, random_scene, render
from probes.mc2 import Sample

TOWARD_TEXT = (
    "In case there is an inconsistency between the text context and the image content, "
    "you should follow the text context rather than the image content."
)
TOWARD_VISION = (
    "In case there is an inconsistency between the image content and the text context, "
    "you should follow the image content rather than the text context."
)
# MC2's task names where they fit, and plain ones where MC2 has none.
TASKS = {
    "color": "color",
    "shape": "object_recognition",
    "position": "positional_reasoning",
    "count": "counting",
    "countof": "counting",
    "background": "attribute",
    "at": "object_position",
    "letter": "letter",
    "number": "number",
}
SAMPLE_KINDS = ("color", "shape", "position", "count", "background", "number", "letter")
CONFLICT_KINDS = ("color", "shape", "position") * 3 + ("background", "number", "number", "letter", "at", "at", "count")

# Context marker -> its bias in the hidden preference; the paper's marker is neutral.
MARKERS = {
    "Text context: ": 0.0,
    "Context: ": 0.2,
    "The caption says: ": -0.4,
    "A friend says: ": 0.4,
    "Note: ": -0.2,
    "Text: ": 0.0,
}
MARKER_WEIGHTS = (7, 1, 1, 1, 1, 1)

TEXT_NAMES = ("text context", "text context", "text", "context", "text")
IMAGE_NAMES = ("image content", "image content", "image", "picture", "image")

# Instructions are a condition and an action; {a} is the source to follow, {b} the other one, {x} and {y} are both in
# any order, so that no rule on the order of mention works.
CONDITIONS = (
    "",
    "",
    "",
    "in case of inconsistency, ",
    "in case there is an inconsistency between the {x} and the {y}, ",
    "if they disagree, ",
    "if the {x} and the {y} conflict, ",
    "if the {x} and the {y} disagree, ",
    "when the two disagree, ",
    "where the {x} and the {y} differ, ",
    "when the {x} contradicts the {y}, ",
    "when the {x} says something else than the {y}, ",
    "if there is a conflict between the {x} and the {y}, ",
    "if there is a conflict, ",
    "if the {x} does not match the {y}, ",
    "whatever the {b} says, ",
    "no matter what the {b} says, ",
)
ACTIONS = (
    "follow the {a}",
    "follow the {a} rather than the {b}",
    "you should follow the {a} rather than the {b}",
    "do not follow the {b} but the {a}",
    "trust the {a}",
    "trust the {a}, not the {b}",
    "trust the {a} more than the {b}",
    "do not trust the {b}",
    "rely on the {a}",
    "rely on the {a} instead of the {b}",
    "never rely on the {b}",
    "believe the {a}, not the {b}",
    "never believe the {b}",
    "use the {a}",
    "use only the {a}",
    "use the {a} and ignore the {b}",
    "do not use the {b}",
    "ignore the {b}",
    "ignore the {b} and use the {a}",
    "go with the {a}",
    "stick to the {a}",
    "prefer the {a}",
    "prefer the {a} over the {b}",
    "choose the {a} over the {b}",
    "pick what the {a} says, never what the {b} says",
    "choose what the {a} says",
    "please give priority to the {a}",
    "give priority to the {a} over the {b}",
    "answer from the {a}",
    "answer from the {a}, never from the {b}",
    "never answer from the {b}",
    "answer according to the {a}",
    "answer based on the {a}, not the {b}",
    "your answer must come from the {a} and not from the {b}",
    "take the answer that the {a} gives",
    "take the {a} as your source",
    "do not take the {b} as your source, take the {a}",
    "base your answer on the {a} instead of the {b}",
    "look at the {a} for the answer, not at the {b}",
    "pay attention to the {a}, not to the {b}",
    "pay attention only to the {a}",
    "take no notice of the {b}",
    "listen to the {a}",
    "do not listen to the {b}",
    "let the {a} decide",
    "let the {a} guide you, not the {b}",
    "forget the {b}",
    "forget about the {b} and take the {a}",
    "leave the {b} out",
    "put the {b} aside",
    "put the {a} first",
    "put the {a} above the {b}",
    "treat the {b} as wrong",
    "treat the {a} as true",
    "assume that the {a} is right",
    "assume that the {b} is false",
    "the {a} is right",
    "the {a} is right and the {b} is wrong",
    "the {b} is wrong",
    "the {b} is wrong, so use the {a}",
    "the {b} may be wrong",
    "the {b} is false and the {a} is true",
    "the {b} lies",
    "the {a} tells the truth",
    "the {a} wins over the {b}",
    "the {a} beats the {b}",
    "the {b} loses against the {a}",
    "the {a} comes before the {b}",
    "the {a} has the last word",
    "the {a} counts, not the {b}",
    "not the {b} but the {a} counts",
    "the {b} does not count",
    "the {b} does not matter",
    "only the {a} matters",
    "what the {a} says is valid",
    "what the {b} says is not valid",
)
HELD_OUT_INSTRUCTIONS = (
    "If the two differ, the {a} wins.",
    "Take your answer from the {a}, never from the {b}.",
    "Should the {b} contradict the {a}, answer from the {a}.",
    "Base the answer on the {a}.",
    "Please believe the {a}.",
    "What counts is the {a}, and the {b} is to be ignored.",
    "Pay no attention to the {b}.",
    "I want the answer that the {a} gives, not the one that the {b} gives.",
    "Between the {b} and the {a}, pick the {a}.",
    "Your only source is the {a}.",
    "Assume that the {a} is true and that the {b} is wrong.",
    "Leave the {b} aside and look at the {a}.",
    "Let your answer be based on the {a}.",
    "When in conflict, the {a} decides.",
    "Even if the {b} says something else, the {a} is to be trusted.",
    "Do not let the {b} decide.",
    "The {a} matters more than the {b}.",
    "Only what the {a} says is true.",
    "Put the {a} before the {b}.",
    "The {b} lies, so listen to the {a}.",
)
SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.", "Be precise.")


def instruction(rng: random.Random, side: str, template: str | None = None) -> str:
    """An instruction toward 'text' or 'vision': the paper's four times in ten, else one of the training wordings.

    `template` (with {a} and {b}) replaces the draw, for wordings held out from training.
    """
    if template is None and rng.random() < 0.4:
        return TOWARD_TEXT if side == "text" else TOWARD_VISION
    text, image = rng.choice(TEXT_NAMES), rng.choice(IMAGE_NAMES)
    a, b = (text, image) if side == "text" else (image, text)
    x, y = rng.choice(((a, b), (b, a)))
    if template is None:
        template = rng.choice(CONDITIONS) + rng.choice(ACTIONS) + "."
    filled = template.format(a=a, b=b, x=x, y=y)
    return filled[0].upper() + filled[1:]


def prefers_vision(kind: str, value: str, alternative: str, marker: str = "Text context: ", noise: float = 0.0) -> bool:
    """The hidden graded rule behind uninstructed answers: True where the picture wins.

    A score of the picture's value plus one of the text's value plus the marker's bias. Scores are spread evenly over
    -1..1 in an order drawn by hash, so every kind follows the picture about half of the time.
    """
    return preference(kind, value, alternative, marker) + noise > 0


def preference(kind: str, value: str, alternative: str, marker: str = "Text context: ") -> float:
    """The score behind `prefers_vision`; its distance from 0 says how clear the case is."""
    return _score(kind, "picture", value) + _score(kind, "text", alternative) + MARKERS[marker]


@lru_cache(maxsize=4096)
def _score(kind: str, side: str, value: str) -> float:
    if kind == "at":
        colour, shape = value.split()
        return (_score("color", side, colour) + _score("shape", side, shape)) * 0.7
    pool = sorted(POOLS[kind], key=lambda v: hashlib.blake2b(f"{kind}/{side}/{v}".encode()).digest())
    return 2 * pool.index(value) / (len(pool) - 1) - 1


def place(context: str, question: str, instruct: str | None, where: str = "middle") -> str:
    """One user text: context, instruction (in the 'middle' as in the paper, at the 'end' or 'first'), question."""
    if instruct is None:
        parts = [context, question]
    elif where == "middle":
        parts = [context, instruct, question]
    else:
        parts = [instruct, context, question] if where == "first" else [context, question, instruct]
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class Conflict:
    """A fact of a scene and the other value that the text claims."""

    scene: Scene
    fact: Fact
    alternative: str

    def context(self, marker: str = "Text context: ") -> str:
        return marker + statement(self.fact.kind, self.fact.key, self.alternative)


def random_conflict(rng: random.Random, scene: Scene, kinds: Sequence[str] = CONFLICT_KINDS) -> Conflict | None:
    fact = pick_fact(rng, scene, kinds)
    return Conflict(scene, fact, alternative(rng, scene, fact.kind, fact.value)) if fact else None


def conflict_question(
    rng: random.Random, scene: Scene, side: str, count: int, instruct: bool = True
) -> Question | None:
    """A conflict as a training question: `side` is text, vision or plain; `count` options, 0 for an open question.

    With `instruct` False the instruction is expected in the system message.
    """
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    for _ in range(4):
        conflict = random_conflict(rng, scene)
        if conflict is None:
            return None
        kind, key, value, cell = conflict.fact
        score = preference(kind, value, conflict.alternative, marker)
        if side != "plain" or abs(score) > 0.25:  # mostly clear cases, so that the rule can be learned
            break
    vision = score + rng.gauss(0, 0.12) > 0 if side == "plain" else side == "vision"
    answer = value if vision else conflict.alternative
    context = conflict.context(marker)
    if rng.random() < 0.12 and (more := pick_fact(rng, scene, ("background", "count", "at"))) and more.kind != kind:
        context += " " + statement(*more[:3])  # something true besides
    words = instruction(rng, side) if side != "plain" and instruct else None
    where = rng.choice(("middle", "middle", "middle", "end", "first"))
    text, reply = ask(rng, kind, key), statement(kind, key, answer)
    if count:
        choices = fill_options(rng, scene, kind, [value, conflict.alternative], min(count, len(POOLS[kind])))
        text, reply = option_question(rng, text, choices, answer)
    name = f"{side}_{'options' if count else 'open'}"
    return Question(name, ((place(context, text, words, where), reply),), cell=cell if vision else None)


def agreeing_question(rng: random.Random, scene: Scene, count: int) -> Question | None:
    """A context that is true, or that speaks of something else, with any instruction or none; 0 options = open."""
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    fact = pick_fact(rng, scene, CONFLICT_KINDS)
    if fact is None:
        return None
    said, words = statement(*fact[:3]), None
    missing = absent_shape(rng, scene)
    if missing and fact.kind in ("color", "shape", "background") and rng.random() < 0.5:
        said = statement("position", missing, rng.choice(POOLS["position"]))
    elif rng.random() < 0.35:  # an instruction has a right answer only where the text speaks of what is asked
        words = instruction(rng, rng.choice(("text", "vision")))
    text, reply = ask(rng, fact.kind, fact.key), statement(*fact[:3])
    if count:
        choices = fill_options(rng, scene, fact.kind, [fact.value], min(count, len(POOLS[fact.kind])))
        text, reply = option_question(rng, text, choices, fact.value)
    return Question("agreeing", ((place(marker + said, text, words), reply),), cell=fact.cell)


def told_question(rng: random.Random, scene: Scene | None, count: int) -> Question | None:
    """The text context alone answers: there is no picture, or the thing asked about is not in it."""
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    if scene is None:
        kind = rng.choice(CONFLICT_KINDS)
        key = {"color": rng.choice(POOLS["shape"]), "position": rng.choice(POOLS["shape"])}.get(kind, "")
        key = {"shape": rng.choice(POOLS["color"]), "at": rng.choice(POOLS["position"])}.get(kind, key)
    else:
        kind = rng.choice(("color", "position"))
        key = absent_shape(rng, scene) if rng.random() < 0.6 else rng.choice(NOUNS)
        if key is None:
            return None
    value = rng.choice(POOLS[kind])
    text, reply = ask(rng, kind, key), statement(kind, key, value)
    if count:
        choices = fill_options(rng, None, kind, [value], min(count, len(POOLS[kind])))
        text, reply = option_question(rng, text, choices, value)
    name = "told" if scene else "told_alone"
    return Question(name, ((place(marker + statement(kind, key, value), text, None), reply),))


# ------------------------------------------------------------------------------------------- held-out samples


def conflict_samples(
    count: int, seed: int, size: Size = (168, 168), kinds: Sequence[str] = SAMPLE_KINDS
) -> list[Sample]:
    """`count` MC2 samples over held-out scenes, the kinds in turn; the same seed gives the same samples."""
    rng = random.Random(f"held-out conflicts {seed}")
    return [_sample(rng, f"world-{seed}-{i}", kinds[i % len(kinds)], size) for i in range(count)]


def neutral_samples(
    count: int, seed: int, size: Size = (168, 168), kinds: Sequence[str] = SAMPLE_KINDS
) -> list[Sample]:
    """The same kinds of question without conflict: no context; `answer_text` is only the wrong option."""
    rng = random.Random(f"held-out neutral {seed}")
    return [_sample(rng, f"neutral-{seed}-{i}", kinds[i % len(kinds)], size, context=False) for i in range(count)]


def _sample(rng: random.Random, name: str, kind: str, size: Size, context: bool = True) -> Sample:
    conflict = None
    while conflict is None:
        scene = random_scene(rng, shapes=rng.choice((1, 2, 2, 3)), held_out=True)
        conflict = random_conflict(rng, scene, (kind,))
    fact = conflict.fact
    return Sample(
        id=name,
        task=TASKS[kind],
        image=render(scene, size, rng),
        question=ask(rng, kind, fact.key),
        answer_vision=fact.value,
        answer_text=conflict.alternative,
        context=statement(kind, fact.key, conflict.alternative) if context else "",
    )
