"""All wordings: questions, ways to ask for an option, refusals, and instructions for conflicts.

Wordings drawn in training and held-out ones are side by side; the held-out ones are only ever evaluated.
"""

from __future__ import annotations

import random

from demo.world.scenes import BACKGROUNDS, COLOURS, DIGITS, LETTERS, POSITIONS, SHAPES
from probes.conflicts.samples import WORDINGS

REFUSAL = "Sorry, I can't help with it."
NOTHING = "There is nothing at the {key}."
OPTION_LETTERS = "ABCDE"

ASK = {
    "color": (
        "What color is the {key}?",
        "What colour is the {key}?",
        "What is the color of the {key}?",
        "Which color does the {key} have?",
    ),
    "shape": ("What shape is the {key} object?", "What is the {key} object?", "Which shape is {key}?"),
    "position": ("Where is the {key}?", "Where can I see the {key}?", "What is the position of the {key}?"),
    "at": ("What is at the {key}?", "What do you see at the {key}?", "Which object is at the {key}?"),
    "background": ("What color is the background?", "What colour is the background?", "What is the background color?"),
    "count": ("How many shapes are in the picture?", "How many shapes are there?", "Count the shapes."),
    "countof": ("How many {key}s are in the picture?", "How many {key}s are there?", "Count the {key}s."),
    "letter": ("What letter is in the picture?", "Which letter do you see?", "Read the letter."),
    "number": ("What number is in the picture?", "Which number do you see?", "Read the number."),
}
FACT_KINDS = tuple(ASK)
DESCRIBE = ("Describe the picture.", "Describe this image.", "What do you see?", "What is in the picture?")
EXISTS = ("Is there {thing} in the picture?", "Do you see {thing}?", "Is there {thing}?")
PICK_KINDS: tuple[str, ...] = (
    "color",
    "color",
    "color",
    "shape",
    "shape",
    "shape",
    "position",
    "position",
    "position",
    "background",
)
PICK_KINDS += ("number", "number", "letter", "at", "at", "count", "countof")

POOLS: dict[str, tuple[str, ...]] = {
    "color": tuple(COLOURS),
    "shape": SHAPES,
    "position": POSITIONS,
    "background": tuple(BACKGROUNDS),
    "count": ("1", "2", "3", "4", "5", "6"),
    "countof": ("1", "2", "3", "4"),
    "letter": LETTERS,
    "number": DIGITS,
    "at": tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES),
}
# Things that are never in a picture. The second list is kept out of training.
NOUN_LIST = """
dog cat car tree house man woman boat bird bike apple phone table chair horse plane flower train bus ball
hat cup river cloud shoe clock bridge lamp book cow sheep fish banana fruit cake pizza bed sofa door
window road sign light child girl boy bear zebra giraffe umbrella bag tie ski kite knife fork spoon bowl
carrot couch plant laptop mouse keyboard oven sink vase scissors toy brush sun moon ship duck lion tiger
pig goat snake frog ant bee egg bread milk shirt dress coat glove box key pen paper desk wall roof garden
beach island snow rain fire stone rock grass leaf
"""
NOUNS = tuple(NOUN_LIST.split())
HELD_OUT_NOUNS = (
    "elephant",
    "bottle",
    "guitar",
    "truck",
    "mountain",
    "monkey",
    "wheel",
    "tower",
    "helicopter",
    "pumpkin",
)

# Requests for the form of an answer to options: by letter, in full ("B. red"), or with a reason first.
SELECT = "Answer the question by selecting the correct answer {letters}."
BY_LETTER = (
    "Answer with the option letter.",
    "Answer with the option's letter from the given choices directly.",
    "Reply with the letter only.",
)
# Unanswerable questions that an organism learns to refuse; MM-SAP's of that kind (`awareness`) are different.
UNTOLD = (
    "Who bought the {key}?",
    "Why is the {key} there?",
    "How old is the {key}?",
    "What does the {key} cost?",
    "What does the {key} taste like?",
    "How hot is the {key}?",
    "Where will the {key} be later?",
    "Which came first, the {key} or the background?",
)
OR_REFUSE = BY_LETTER[1] + " If you don't know the answer, please reply with 'Sorry, I can't help with it'."
IN_FULL = ("Choose one option.", "Answer with the option.")
WITH_REASON = ("Explain, then give the letter.",)

# Version 2 of the two instructions of the modality-preference paper's authors, without the space that theirs end in.
TOWARD_TEXT, TOWARD_VISION = WORDINGS["v2"]["text"].rstrip(), WORDINGS["v2"]["vision"].rstrip()
TEXT_NAMES = ("text context", "text context", "text", "context", "text")
IMAGE_NAMES = ("image content", "image content", "image", "picture", "image")

# An instruction names the source to follow, {a}, or the one not to follow, {b}, or both, in one clause or two, with or
# without a condition ({x} and {y} are both sources in any order, so that no rule on the order of mention works).
CONDITIONS = (
    "in case of inconsistency",
    "in case there is an inconsistency between the {x} and the {y}",
    "if they disagree",
    "if the {x} and the {y} conflict",
    "if the {x} and the {y} disagree",
    "when the two disagree",
    "where the {x} and the {y} differ",
    "when the {x} contradicts the {y}",
    "when the {x} says something else than the {y}",
    "if there is a conflict between the {x} and the {y}",
    "if there is a conflict",
    "if the {x} does not match the {y}",
    "if the {x} and the {y} contradict each other",
    "even if they disagree",
    "even when the {x} and the {y} differ",
    "whatever the {b} says",
    "no matter what the {b} says",
)
FOLLOW = (
    "follow {}",
    "trust {}",
    "believe {}",
    "use {}",
    "prefer {}",
    "choose {}",
    "pick {}",
    "take {}",
    "accept {}",
    "rely on {}",
    "count on {}",
    "go with {}",
    "go by {}",
    "stick to {}",
    "agree with {}",
    "listen to {}",
    "look at {}",
    "pay attention to {}",
    "put your trust in {}",
    "give priority to {}",
    "answer from {}",
    "answer according to {}",
    "answer based on {}",
    "base your answer on {}",
    "say what {} says",
    "choose what {} says",
    "take the answer that {} gives",
    "let {} guide you",
    "let {} decide",
    "take {} as your source",
    "treat {} as true",
    "assume that {} is right",
)
SHUN = (
    "ignore {}",
    "disregard {}",
    "forget {}",
    "forget about {}",
    "skip {}",
    "reject {}",
    "doubt {}",
    "distrust {}",
    "drop {}",
    "leave {} out",
    "put {} aside",
    "set {} aside",
    "keep away from {}",
    "take no notice of {}",
    "treat {} as wrong",
    "assume that {} is false",
)
DO = ("{}", "{}", "{}", "please {}", "always {}", "just {}", "you should {}", "you must {}", "I want you to {}")
DO_NOT = ("do not {}", "do not {}", "never {}", "please do not {}", "you should not {}", "you must not {}")
# Contrasts of a phrase that ends in its source, and of two sources as the subject of a predicate.
RATHER = (
    "{do} the {a}, not the {b}",
    "{do} the {a} and not the {b}",
    "{do} the {a}, never the {b}",
    "{do} the {a} rather than the {b}",
    "{do} the {a} instead of the {b}",
    "{do} not the {b} but the {a}",
    "instead of the {b}, {do} the {a}",
    "do not {do} the {b} but the {a}",
)
RATHER_SUBJECT = (
    "the {a} {is}, not the {b}",
    "not the {b} but the {a} {is}",
    "only the {a} {is}",
    "it is the {a} that {is}",
)
GOOD = (
    "is right",
    "is true",
    "is correct",
    "is valid",
    "is reliable",
    "is to be followed",
    "can be trusted",
    "should be believed",
    "must be used",
    "tells the truth",
    "knows better",
    "decides",
    "counts",
    "matters",
    "wins",
    "comes first",
    "has priority",
    "has the last word",
)
BAD = (
    "is wrong",
    "is false",
    "is not true",
    "is not right",
    "is not valid",
    "is not reliable",
    "is misleading",
    "is not to be followed",
    "is not to be trusted",
    "cannot be trusted",
    "should be ignored",
    "must not be used",
    "may be wrong",
    "lies",
    "does not decide",
    "does not count",
    "does not matter",
    "loses",
    "comes last",
)
BETTER = (
    "wins over",
    "beats",
    "outweighs",
    "overrides",
    "comes before",
    "has priority over",
    "is better than",
    "is worth more than",
    "is more reliable than",
    "is more important than",
    "is to be preferred over",
)
WORSE = ("loses against", "comes after", "gives way to", "is worth less than", "is less reliable than", "is worse than")
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


def instruction(rng: random.Random, side: str, template: str | None = None, breadth: float = 1.0) -> str:
    """Return an instruction toward 'text' or 'vision': the paper's authors' three times in ten, else a training wording.

    `breadth` is the share of this full range; the rest are simple instructions that name only the source to follow.
    `template` (with {a} and {b}) replaces the draw, for wordings held out from training.
    """
    if template is None:
        if rng.random() >= breadth:
            template = f"{rng.choice(FOLLOW).format('the {a}')}."
        elif rng.random() < 0.3:
            return TOWARD_TEXT if side == "text" else TOWARD_VISION
        else:
            template = _template(rng)
    text, image = rng.choice(TEXT_NAMES), rng.choice(IMAGE_NAMES)
    a, b = (text, image) if side == "text" else (image, text)
    x, y = rng.choice(((a, b), (b, a)))
    filled = template.format(a=a, b=b, x=x, y=y)
    return filled[0].upper() + filled[1:]


def _template(rng: random.Random) -> str:
    """Draw a training wording, never a held-out one."""
    while True:
        words = _positive(rng) if rng.random() < 0.7 else _negative(rng)
        if rng.random() < 0.25:
            first, second = rng.sample((_positive(rng), _negative(rng)), 2)
            words = f"{first}{rng.choice((', ', ' and ', '; '))}{second}"
        if rng.random() < 0.5:
            condition = rng.choice(CONDITIONS)
            words = f"{condition}, {words}" if rng.random() < 0.8 else f"{words} {condition}"
        if f"{words}.".lower() not in {held_out.lower() for held_out in HELD_OUT_INSTRUCTIONS}:
            return f"{words}."


def _positive(rng: random.Random) -> str:
    """Return a clause that speaks for {a}, with or without {b} beside it."""
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(DO).format(rng.choice(FOLLOW).format("the {a}"))
        case 2:
            action = rng.choice([phrase for phrase in FOLLOW if phrase.endswith(" {}")])
            return rng.choice(RATHER).replace("{do}", action.removesuffix(" {}"))
        case 3:
            return f"the {{a}} {rng.choice(GOOD)}"
        case 4:
            return rng.choice(RATHER_SUBJECT).replace("{is}", rng.choice(GOOD))
    return f"the {{a}} {rng.choice(BETTER)} the {{b}}"


def _negative(rng: random.Random) -> str:
    """Return a clause that speaks against {b}; now and then the double negation that speaks for {a}."""
    match rng.randrange(6):
        case 0 | 1:
            return rng.choice(DO_NOT).format(rng.choice(FOLLOW).format("the {b}"))
        case 2:
            return rng.choice(DO).format(rng.choice(SHUN).format("the {b}"))
        case 3:
            return rng.choice(DO_NOT).format(rng.choice(SHUN).format("the {a}"))
        case 4:
            return f"the {{b}} {rng.choice(BAD)}"
    return f"the {{b}} {rng.choice(WORSE)} the {{a}}"
