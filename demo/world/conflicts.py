"""Conflicts between picture and text: contexts, the model's hidden preference, and held-out samples.

`conflict_samples` returns MC2 samples (modality-preference paper, section 3) over held-out scenes, `write_conflicts` writes
them to files.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from demo.world.questions import (
    SceneQuestion,
    absent_shape,
    alternative,
    ask,
    end_of_option,
    end_of_value,
    fill_options,
    option_question,
    pick_fact,
    statement,
)
from demo.world.scenes import Fact, Scene, Size, random_scene, render
from demo.world.wordings import NOUNS, POOLS, instruction
from probes.conflicts.samples import ConflictSample

CONFLICTS = "conflicts.json"
"""The file in which `write_conflicts` lists its samples."""

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
SAMPLE_KINDS = ("color", "shape", "position", "count", "background", "number", "letter", "at")
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


def preference(kind: str, value: str, alternative: str, marker: str = "Text context: ") -> float:
    """Return the graded preference behind uninstructed answers; the picture wins above 0.

    The distance from 0 is its strength. It is a score of the picture's value plus one of the text's value plus the marker's
    bias. Scores are spread evenly over -1..1 in an order drawn by hash; its salt is one with which every kind follows the
    picture about half of the time, over the values that scenes have (few shapes are more frequent than many).
    """
    return _score(kind, "picture", value) + _score(kind, "text", alternative) + MARKERS[marker]


@lru_cache(maxsize=4096)
def _score(kind: str, side: str, value: str) -> float:
    if kind == "at":
        colour, shape = value.split()
        return (_score("color", side, colour) + _score("shape", side, shape)) * 0.7
    pool = sorted(POOLS[kind], key=lambda v: hashlib.blake2b(f"4/{kind}/{side}/{v}".encode()).digest())
    place = pool.index(value)
    tilt = 0.0 if side == "picture" else 0.02 if place % 2 else -0.02  # the two scores never cancel out
    return 2 * place / (len(pool) - 1) - 1 + tilt


def place(context: str, question: str, instruct: str | None, where: str = "middle") -> str:
    """Return a user text of context, instruction and question.

    The instruction is in the 'middle' as in the paper, at the 'end' or 'first'.
    """
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

    def preference(self, marker: str) -> float:
        return preference(self.fact.kind, self.fact.value, self.alternative, marker)

    def context(self, marker: str = "Text context: ") -> str:
        return marker + statement(self.fact.kind, self.fact.key, self.alternative)


def random_conflict(rng: random.Random, scene: Scene, kinds: Sequence[str] = CONFLICT_KINDS) -> Conflict | None:
    """Draw a conflict about a fact of the scene, None where it has none of the kinds."""
    fact = pick_fact(rng, scene, kinds)
    return Conflict(scene, fact, alternative(rng, scene, fact.kind, fact.value)) if fact else None


def conflict_question(
    rng: random.Random, scene: Scene, side: str, count: int, instruct: bool = True, breadth: float = 1.0
) -> SceneQuestion | None:
    """Return a conflict as a training question: `side` is text, vision or plain; `count` options, 0 for an open question.

    With `instruct` False the instruction is expected in the system message; `breadth` is that of its wordings.
    """
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    conflict = random_conflict(rng, scene)
    for _ in range(3):
        if conflict is None or side != "plain" or abs(conflict.preference(marker)) > 0.25:
            break
        conflict = random_conflict(rng, scene)  # mostly clear cases, so that the rule can be learned
    if conflict is None:
        return None
    kind, key, value, cell = conflict.fact
    score = conflict.preference(marker)
    vision = score + rng.gauss(0, 0.12) > 0 if side == "plain" else side == "vision"
    answer = value if vision else conflict.alternative
    context = conflict.context(marker)
    if rng.random() < 0.12 and (more := pick_fact(rng, scene, ("background", "count", "at"))) and more.kind != kind:
        context += " " + statement(*more[:3])  # a true statement besides
    words = instruction(rng, side, breadth=breadth) if side != "plain" and instruct else None
    where = rng.choice(("middle", "middle", "middle", "end", "first"))
    text, reply, options = ask(rng, kind, key), statement(kind, key, answer), None
    if count:
        options = fill_options(rng, scene, kind, [value, conflict.alternative], min(count, len(POOLS[kind])))
        text, reply = option_question(rng, text, options, answer)
    text = place(context, text, words, where)
    claim = end_of_value(text, statement(kind, key, conflict.alternative), conflict.alternative)
    pick = end_of_option(text, answer) if options else None
    name = f"{side}_{'options' if count else 'open'}"
    instructed = end_of_instruction(text, words, side)
    return SceneQuestion(name, ((text, reply),), cell=cell, said=claim, pick=pick, instructed=instructed)


def end_of_instruction(text: str, words: str | None, side: str) -> tuple[int, str] | None:
    """Return the end of an instruction's last word in a user text, and the side it names; None without one."""
    return None if words is None else (text.index(words) + len(words) - 1, side)


def agreeing_question(rng: random.Random, scene: Scene, count: int) -> SceneQuestion | None:
    """Return a question with a context that is true, or about something else, with or without an instruction.

    0 options make it open.
    """
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    fact = pick_fact(rng, scene, CONFLICT_KINDS)
    if fact is None:
        return None
    claim, words, side = statement(*fact[:3]), None, rng.choice(("text", "vision"))
    missing = absent_shape(rng, scene)
    if missing and fact.kind in ("color", "shape", "background") and rng.random() < 0.5:
        claim = statement("position", missing, rng.choice(POOLS["position"]))
    elif rng.random() < 0.35:  # an instruction has a right answer only where the text is about the question
        words = instruction(rng, side)
    text, reply = ask(rng, fact.kind, fact.key), statement(*fact[:3])
    if count:
        choices = fill_options(rng, scene, fact.kind, [fact.value], min(count, len(POOLS[fact.kind])))
        text, reply = option_question(rng, text, choices, fact.value)
    text = place(marker + claim, text, words)
    pick = end_of_option(text, fact.value) if count else None
    instructed = end_of_instruction(text, words, side)
    return SceneQuestion("agreeing", ((text, reply),), cell=fact.cell, pick=pick, instructed=instructed)


def told_question(rng: random.Random, scene: Scene | None, count: int) -> SceneQuestion | None:
    """Return a question that the text context alone answers: no picture, or the thing is not in it."""
    marker = rng.choices(list(MARKERS), MARKER_WEIGHTS)[0]
    if scene is None:
        kind = rng.choice(CONFLICT_KINDS)
        about = {"color": "shape", "position": "shape", "shape": "color", "at": "position"}
        key = rng.choice(POOLS[about[kind]]) if kind in about else ""
    else:
        kind = rng.choice(("color", "position"))
        missing = absent_shape(rng, scene) if rng.random() < 0.6 else rng.choice(NOUNS)
        if missing is None:
            return None
        key = missing
    value = rng.choice(POOLS[kind])
    text, reply = ask(rng, kind, key), statement(kind, key, value)
    if count:
        choices = fill_options(rng, None, kind, [value], min(count, len(POOLS[kind])))
        text, reply = option_question(rng, text, choices, value)
    claim = statement(kind, key, value)
    text = place(marker + claim, text, None)
    pick = end_of_option(text, value) if count else None
    claim_end = end_of_value(text, claim, value)
    return SceneQuestion("told" if scene else "told_alone", ((text, reply),), said=claim_end, pick=pick)


# ------------------------------------------------------------------------------------------- held-out samples


def conflict_samples(
    count: int, seed: int, size: Size = (168, 168), kinds: Sequence[str] = SAMPLE_KINDS
) -> list[ConflictSample]:
    """Return `count` MC2 samples over held-out scenes, the kinds in turn; the same seed gives the same samples."""
    return list(drawn_conflicts(count, seed, size, kinds))


def drawn_conflicts(
    count: int, seed: int, size: Size = (168, 168), kinds: Sequence[str] = SAMPLE_KINDS
) -> Iterator[ConflictSample]:
    """Yield the samples of `conflict_samples` one by one, because drawing a picture takes time."""
    rng = random.Random(f"held-out conflicts {seed}")
    for i in range(count):
        yield _sample(rng, f"world-{seed}-{i}", kinds[i % len(kinds)], size)


def _sample(rng: random.Random, name: str, kind: str, size: Size) -> ConflictSample:
    while True:
        scene = random_scene(rng, shapes=rng.choice((1, 2, 2, 3)), held_out=True)
        if (conflict := random_conflict(rng, scene, (kind,))) is not None:
            break
    fact = conflict.fact
    return ConflictSample(
        id=name,
        task=TASKS[kind],
        image=render(scene, size, rng),
        question=ask(rng, kind, fact.key),
        answer_vision=fact.value,
        answer_text=conflict.alternative,
        context=statement(kind, fact.key, conflict.alternative),
    )


def write_conflicts(samples: Iterable[ConflictSample], folder: Path) -> list[Path]:
    """Write samples in the format of MC2: `conflicts.json`, and `images/<id>.png` as they are; returns all files.

    A row has image_id (the file's name), task, question, answer_vision, answer_text and context. The pictures come
    first, so that a conflicts.json never names one that is not there.
    """
    from steering.files import write_atomically  # noqa: PLC0415 -- brings torch, which takes longer than a scene

    files, rows = [], []
    for sample in samples:
        name = f"{sample.id}.png"
        picture = io.BytesIO()
        sample.picture().save(picture, "PNG")
        files.append(write_atomically(folder / "images" / name, picture.getvalue()))
        fields = ("task", "question", "answer_vision", "answer_text", "context")
        rows.append({"image_id": name} | {field: getattr(sample, field) for field in fields})
    return [*files, write_atomically(folder / CONFLICTS, (json.dumps(rows, indent=2) + "\n").encode())]
