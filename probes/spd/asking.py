"""The questions about a pair in either set, and the conditions that change their words, pictures or prompting method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from probes.answering.base import Question, Reply
from probes.answering.talks import Talk, together
from probes.harness.comparison import Way, told_apart
from probes.harness.conditions import Conditions
from probes.harness.pictures import chat
from probes.image_pairs.claims import counted
from probes.image_pairs.questions import DIFFERENT, EXPLAINED_DIFFERENT, EXPLAINED_SAME, SAME, WHAT
from probes.spd.methods import METHODS, Method, plain
from probes.spd.samples import PicturePair

Part = Literal["single", "several"]
COUNT = "How many differences are there between the two pictures?"
FIND = "There {are} in the picture. Can you find {them}?"
AS_JSON = (
    ' Answer with a JSON list that has an object for each difference: {"type": "color", "remove" or "position", '
    '"category": the name of what changed, "target_color": its new colour, where that changed}.'
)
SINGLE = (SAME, DIFFERENT)
SEVERAL = (COUNT, WHAT, SAME, DIFFERENT, EXPLAINED_SAME, EXPLAINED_DIFFERENT)
"""The questions about a pair of either set; for several differences `FIND` follows, with the answer to `COUNT`."""

Hint = Literal["right", "wrong", "implicit"]


@dataclass(frozen=True)
class Manner:
    """A condition of the benchmark.

    way: the interventions inside the model. hint: the kind of hint in the question (appendix C.2: explicit, the answer
    itself, or a wrong one; implicit, tags that only want to be completed). hidden: the share of the pictures' blocks that is
    hidden. method: the prompting method. parts: the sets that are asked about under it.
    """

    way: Way = ()
    hint: Hint | None = None
    hidden: float = 0.0
    method: Method = plain
    parts: tuple[Part, ...] = ("single", "several")


OWN: Mapping[str, Manner] = {
    "SC": Manner(method=METHODS["SC"], parts=("several",)),
    "SR": Manner(method=METHODS["SR"], parts=("several",)),
    "API": Manner(method=METHODS["API"], parts=("several",)),
    "Zoom-Refine": Manner(method=METHODS["Zoom-Refine"], parts=("several",)),
    "hint": Manner(hint="right", parts=("single",)),
    "wrong hint": Manner(hint="wrong", parts=("single",)),
    "implicit hint": Manner(hint="implicit", parts=("single",)),
    **{f"{share} % hidden": Manner(hidden=share / 100, parts=("single",)) for share in (25, 50, 75, 100)},
}
"""The benchmark's own conditions.

They are the prompt-level methods of the paper's Tables 6 and 10, the hints of its Table 8, the block masking of its Figure
12.
"""


def manners(conditions: Conditions) -> dict[str, Manner]:
    """Return the manner of asking for each of the chosen conditions."""
    return {name: OWN.get(name, Manner(way)) for name, way in conditions.items()}


@dataclass(frozen=True)
class Presentation:
    """The presentation that all conditions share.

    merged: both pictures are shown as one. as_json: differences are requested as JSON. max_tokens: the length of an answer
    at most. categories: the names of the objects that can change.
    """

    merged: bool = False
    as_json: bool = False
    max_tokens: int = 64
    categories: tuple[str, ...] = ()


def talk(pair: PicturePair, part: Part, manner: Manner, form: Presentation) -> Talk[list[Reply]]:
    """Ask about a pair and return the replies to `SINGLE`, or to `SEVERAL` and `FIND` (empty if none is counted)."""

    def ask(text: str) -> Talk[Reply]:
        question = f"{text}{AS_JSON}" if form.as_json and text not in (COUNT, SAME, DIFFERENT) else text
        return manner.method(_question(pair, _add_hint(question, text, manner.hint), manner, form), form.categories)

    if part == "single":
        return (yield from together(map(ask, SINGLE)))
    replies = yield from together(map(ask, SEVERAL))
    number = counted(replies[0].text)
    final = Reply("") if number == 0 else (yield from ask(find(number)))
    return [*replies, final]


def find(number: int | None) -> str:
    """Return the question for as many differences as the model counted; for "the differences" if it stated no number."""
    if number == 1:
        return FIND.format(are="is 1 difference", them="it")
    return FIND.format(are="are differences" if number is None else f"are {number} differences", them="them")


def _add_hint(question: str, text: str, hint: Hint | None) -> str:
    """Return the question with its hint; in the single set all pairs differ, so the right answers are known."""
    right = {SAME: "no", DIFFERENT: "yes"}.get(text)
    if hint is None or right is None:
        return question
    if hint == "implicit":
        return f"<question>{question}</question>\n<answer>"
    wrong = "yes" if right == "no" else "no"
    return f"{question} The answer is {right if hint == 'right' else wrong}."


def _question(pair: PicturePair, text: str, manner: Manner, form: Presentation) -> Question:
    push, interventions = told_apart(manner.way)
    pictures = pair.pictures(merged=form.merged, hidden=manner.hidden)
    return Question(chat(pictures, text), push, form.max_tokens, interventions, None)


def most(part: Part, manner: Manner) -> int:
    """Return the largest number of questions about a pair."""
    return (len(SINGLE) if part == "single" else len(SEVERAL) + 1) * manner.method.most
