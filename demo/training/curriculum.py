"""The curriculum: question types with base weights, targets and gates, and groups of questions about pictures.

The curriculum follows accuracy, not time. A type's weight is base x (0.3 + 1.2 x its distance from its target); a gate keeps
a type closed until another one is learned; a mastered type keeps its floor, which is the replay.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from demo.world import conflicts, questions, several, wordings
from demo.world.questions import SceneQuestion
from demo.world.scenes import SIDE, WORLDS, Habits, Scene, random_scene

Accuracy = Mapping[str, float]


@dataclass(frozen=True)
class Kind:
    """A question type: its base weight, the accuracy aimed at, and the types (with accuracies) that open it."""

    base: float
    gates: tuple[tuple[str, float], ...] = ()
    target: float = 1.0

    def weight(self, name: str, accuracy: Accuracy) -> float:
        if any(accuracy.get(gate, 0.0) < needed for gate, needed in self.gates):
            return 0.0
        missing = (self.target - accuracy.get(name, 0.0)) / 0.35
        return self.base * (0.3 + 1.2 * max(0.0, min(1.0, missing)))


SEEN = (("color", 0.6),)
BOUND = (("color", 0.85), ("position", 0.7))
LETTERED = (("lookup", 0.7), ("color", 0.8))
PICKING = (("options", 0.8),)
STEERED = (("text_options", 0.75), ("vision_options", 0.75))

# About one picture (the last ones about none).
SINGLE = {
    "color": Kind(1.0),
    "shape": Kind(1.0),
    "position": Kind(2.2),
    "at": Kind(1.5),
    "background": Kind(0.4),
    "count": Kind(0.8),
    "countof": Kind(2.0),
    "letter": Kind(0.6),
    "number": Kind(0.8),
    "describe": Kind(1.6),
    "empty": Kind(0.3, SEEN),
    "exists": Kind(0.9, SEEN),
    "refuse": Kind(1.8, SEEN),
    "lookup": Kind(2.2, SEEN),
    "lookup_reason": Kind(0.9, SEEN),
    "lookup_word": Kind(0.5, SEEN),
    "options": Kind(2.6, LETTERED),
    "options_more": Kind(2.2, PICKING),
    "refuse_option": Kind(0.8, (*PICKING, ("refuse", 0.6))),
    "text_open": Kind(0.9, BOUND),
    "vision_open": Kind(1.1, BOUND),
    "plain_open": Kind(0.8, BOUND, target=0.85),
    "text_options": Kind(1.8, LETTERED),
    "vision_options": Kind(2.4, LETTERED),
    "plain_options": Kind(1.6, STEERED, target=0.85),
    "agreeing": Kind(0.4, BOUND),
    "told": Kind(0.35, BOUND),
    "told_alone": Kind(0.4, LETTERED),
    "turns": Kind(0.3, BOUND),
}
# About one of several pictures.
SEVERAL = {
    "several_background": Kind(1.8),
    "several_color": Kind(2.0),
    "several_shape": Kind(1.0),
    "several_position": Kind(1.0, (("several_background", 0.8),)),
    "several_at": Kind(0.6, (("several_background", 0.8),)),
    "several_number": Kind(0.4),
    "several_letter": Kind(0.3),
    "several_count": Kind(0.3),
    "several_pictures": Kind(0.1),
    "several_describe": Kind(1.4),
    "several_which": Kind(2.0),
    "several_options": Kind(1.2, (("several_background", 0.8),)),
    "several_refuse": Kind(0.8, (("several_background", 0.8),)),
}
DIFFERENCES = {
    "difference_color": Kind(1.0),
    "difference_remove": Kind(1.2),
    "difference_move": Kind(1.4),
    "difference_add": Kind(1.2),
    "difference_none": Kind(0.7),
}
OPEN = {
    name: Kind(0.0) for name in ("system_text", "system_vision", "difference_same", "picture_options", "calibrated")
}
TYPES = tuple(dict.fromkeys([*SINGLE, *SEVERAL, *DIFFERENCES, *OPEN]))

ALONE = ("told_alone", "lookup", "lookup_reason", "lookup_word")  # asked without a picture


@dataclass(frozen=True)
class Course:
    """The distribution of a run's questions.

    `only`: the types asked, with fixed weights in place of the curriculum's (none: all, by the curriculum). world: its name
    in `scenes.WORLDS`. yes: the share of the existence questions that are about something in the picture. sight: the pixels
    a side with which a picture is seen. shapes, pictures: how many a picture, and a conversation about several, has.
    """

    only: tuple[tuple[str, float], ...] = ()
    world: str = "even"
    yes: float = 0.45
    sight: int = SIDE
    shapes: tuple[int, ...] | None = None
    pictures: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if unknown := {name for name, _ in self.only} - set(TYPES):
            raise ValueError(f"unknown types {', '.join(sorted(unknown))}; there are {', '.join(TYPES)}")

    @property
    def habits(self) -> Habits:
        return WORLDS[self.world]


OPEN_MAKERS = (
    lambda rng, scene: questions.open_question(rng, scene, rng.choice(wordings.FACT_KINDS)),
    questions.description,
    questions.refusal,
    questions.existence,
)


@dataclass
class Plan:
    """The draw probabilities that follow from the accuracies so far."""

    single: dict[str, float]
    several: dict[str, float]
    differences: dict[str, float]
    option_counts: tuple[int, ...] = (2,)
    several_share: float = 0.0
    difference_share: float = 0.0
    pictures: tuple[int, ...] = (2,)
    shapes: tuple[int, ...] = (1, 2, 2, 3, 3, 4)
    several_shapes: tuple[int, ...] = (1, 1, 2)
    conflicts_open: bool = False
    breadth: float = 0.2  # share of the full range of instructions; the others are simple
    course: Course = Course()


def make_plan(accuracy: Accuracy, course: Course = Course()) -> Plan:
    """Return the plan for running accuracies per type (0 where a type was not asked yet)."""
    if course.only:
        return _fixed_plan(course)
    single, several_questions, differences = (
        {name: w for name, kind in kinds.items() if (w := kind.weight(name, accuracy)) > 0}
        for kinds in (SINGLE, SEVERAL, DIFFERENCES)
    )
    plan = Plan(single, several_questions, differences)
    got = accuracy.get
    plan.conflicts_open = got("vision_options", 0.0) > 0.7
    learned = min(got("text_open", 0.0), got("vision_open", 0.0))
    plan.breadth = max(0.2, min(1.0, (learned - 0.6) / 0.2))
    if got("options", 0.0) > 0.85:
        plan.option_counts = (2, 2, 3, 4, 5)
    if got("color", 0.0) > 0.9 and got("position", 0.0) > 0.8:
        plan.several_share = 0.4
    if got("several_background", 0.0) > 0.8:
        plan.pictures, plan.several_shapes, plan.difference_share = (2, 3, 3, 4), (1, 2, 2, 3), 0.42
    if got("describe", 0.0) > 0.8:
        plan.shapes = (1, 2, 2, 3, 3, 4, 5)
    return _bound(plan, course)


def _fixed_plan(course: Course) -> Plan:
    """Return the plan of a course with fixed weights."""
    single: dict[str, float] = {}
    several: dict[str, float] = {}
    differences: dict[str, float] = {}
    for name, weight in course.only:
        (several if name in SEVERAL else differences if name in DIFFERENCES else single)[name] = weight
    several_weight = sum(several.values()) + sum(differences.values())
    plan = Plan(single, several, differences, breadth=1.0)
    plan.several_share = several_weight / (several_weight + sum(single.values()))
    plan.difference_share = sum(differences.values()) / several_weight if several_weight else 0.0
    return _bound(plan, course)


def _bound(plan: Plan, course: Course) -> Plan:
    return replace(plan, course=course, shapes=course.shapes or plan.shapes, pictures=course.pictures or plan.pictures)


@dataclass
class TaskGroup:
    """Pictures that several independent questions share."""

    scenes: list[Scene]
    questions: list[SceneQuestion]
    system: str | None = None
    text_first: bool = False


def make_group(rng: random.Random, plan: Plan) -> TaskGroup:
    """Draw pictures and three to six questions about them (one or two where the text stands first)."""
    group = _several(rng, plan) if rng.random() < plan.several_share else _single(rng, plan)
    if group.system is None and rng.random() < 0.15:
        group.system = rng.choice(wordings.SYSTEM_MESSAGES)
    return group


def _draw(rng: random.Random, weights: Mapping[str, float]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _single(rng: random.Random, plan: Plan) -> TaskGroup:
    scene = random_scene(rng, rng.choice(plan.shapes), held_out=False, habits=plan.course.habits)
    if plan.conflicts_open and rng.random() < 0.06:  # the instruction is in the system message
        side = rng.choice(("text", "vision"))
        before = rng.choice(("", f"{rng.choice(wordings.SYSTEM_MESSAGES)} "))
        drawn = [conflicts.conflict_question(rng, scene, side, rng.choice((0, 2, 2)), False) for _ in range(4)]
        questions_drawn = [replace(q, kind=f"system_{side}") for q in drawn if q is not None]
        return TaskGroup([scene], questions_drawn, before + wordings.instruction(rng, side))
    first = _draw(rng, plan.single)
    if first == "told_alone" or (first in ALONE and rng.random() < 0.4):
        weights = {name: weight for name, weight in plan.single.items() if name in ALONE}
        drawn = [_ask_single(rng, scene, kind, plan) for kind in [first, *(_draw(rng, weights) for _ in range(4))]]
        return TaskGroup([], [question for question in drawn if question is not None])
    text_first = rng.random() < 0.25  # about a tenth of the questions, as these groups are small
    kinds = [first, *(_draw(rng, plan.single) for _ in range(rng.randint(0, 1) if text_first else rng.randint(2, 5)))]
    drawn = [_ask_single(rng, scene, kind, plan) for kind in kinds if kind != "told_alone"]
    return TaskGroup([scene], [question for question in drawn if question is not None], text_first=text_first)


def _ask_single(rng: random.Random, scene: Scene, kind: str, plan: Plan) -> SceneQuestion | None:
    count = rng.choice(plan.option_counts)
    if kind in wordings.FACT_KINDS:
        return questions.open_question(rng, scene, kind)
    if kind in ("options", "options_more"):
        return questions.options(rng, scene, 2 if kind == "options" else rng.choice((3, 4, 5)))
    if kind.startswith("lookup"):
        return questions.lookup(rng, kind)
    side, _, form = kind.partition("_")
    if side in ("text", "vision", "plain"):
        return conflicts.conflict_question(rng, scene, side, count if form == "options" else 0, breadth=plan.breadth)
    if kind == "picture_options":  # a conflict without an instruction: the picture decides
        question = conflicts.conflict_question(rng, scene, "vision", count, instruct=False)
        return None if question is None else replace(question, kind=kind)
    if kind == "exists":
        return questions.existence(rng, scene, plan.course.yes)
    if kind == "agreeing":
        return conflicts.agreeing_question(rng, scene, rng.choice((0, count)) if plan.conflicts_open else 0)
    if kind.startswith("told"):
        with_options = plan.conflicts_open and rng.random() < 0.6
        return conflicts.told_question(rng, scene if kind == "told" else None, count if with_options else 0)
    if kind == "turns":
        return questions.several_turns(rng, scene, OPEN_MAKERS)
    makers: dict[str, Callable[[random.Random, Scene], SceneQuestion | None]] = {
        "describe": questions.description,
        "empty": questions.empty,
        "refuse": questions.refusal,
        "refuse_option": questions.refusal_option,
        "calibrated": questions.calibrated,
    }
    return makers[kind](rng, scene)


def _several(rng: random.Random, plan: Plan) -> TaskGroup:
    if plan.differences and rng.random() < plan.difference_share:
        kind = _draw(rng, plan.differences).removeprefix("difference_")
        first, second, question = several.difference_pair(rng, kind, plan.several_shapes)
        scenes, questions_asked = [first, second], [question]
        if rng.random() < 0.3:
            questions_asked.append(several.same_or_not(rng, first, second))
        count = rng.randint(1, 2)
    else:
        scenes, questions_asked = several.related_scenes(rng, rng.choice(plan.pictures), plan.several_shapes), []
        count = rng.randint(3, 6)
    text_first = not questions_asked and len(scenes) == 2 and rng.random() < 0.15
    drawn = [_ask_several(rng, scenes, _draw(rng, plan.several), plan) for _ in range(1 if text_first else count)]
    return TaskGroup(scenes, questions_asked + [q for q in drawn if q is not None], text_first=text_first)


def _ask_several(rng: random.Random, scenes: list[Scene], kind: str, plan: Plan) -> SceneQuestion | None:
    name = kind.removeprefix("several_")
    match name:
        case "describe":
            return several.describe_one(rng, scenes)
        case "which":
            return several.which_picture(rng, scenes)
        case "options":
            return several.options_of_one(rng, scenes, rng.choice(plan.option_counts))
        case "refuse":
            return several.refusal_of_one(rng, scenes)
        case "pictures":
            return several.how_many_pictures(rng, scenes)
    return several.fact_of_one(rng, scenes, name)


def corpus(count: int, seed: int = 0) -> list[str]:
    """Return plain text of everything that can be asked and answered, for training the tokenizer."""
    rng = random.Random(f"corpus {seed}")
    plan = make_plan(dict.fromkeys(TYPES, 0.9))
    lines = []
    for _ in range(count):
        group = make_group(rng, plan)
        system = f"system\n{group.system}\n" if group.system else ""
        pictures = "".join(f"Picture {k + 1}: " for k in range(len(group.scenes))) if len(group.scenes) > 1 else ""
        for question in group.questions:
            turns = [f"user\n{pictures}{text}\nassistant\n{answer}" for text, answer in question.turns]
            lines.append(system + "\n".join(turns))
    return lines
