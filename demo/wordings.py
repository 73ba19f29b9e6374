"""Every wording: questions, ways to ask for an option, refusals, and instructions for conflicts.

What training draws and what is held out from it stand side by side; the held-out wordings are only ever evaluated.
"""

from __future__ import annotations

import random

from demo.world import BACKGROUNDS, COLOURS, DIGITS, LETTERS, POSITIONS, SHAPES
from probes.mc2 import INSTRUCTIONS

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

# How the answer to a question with options is asked for: by letter, in full ("B. red"), or with a reason first.
SELECT = "Answer the question by selecting the correct answer {letters}."
BY_LETTER = (
    "Answer with the option letter.",
    "Answer with the option's letter from the given choices directly.",
    "Reply with the letter only.",
)
OR_REFUSE = BY_LETTER[1] + " If you don't know the answer, please reply with 'Sorry, I can't help with it'."
IN_FULL = ("Choose one option.", "Answer with the option.")
WITH_REASON = ("Explain, then give the letter.",)

# The paper's two instructions (modality-preference, section 3).
TOWARD_TEXT, TOWARD_VISION = INSTRUCTIONS["text"], INSTRUCTIONS["vision"]
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
    "if the {x} and the {y} contradict each other, ",
    "even if they disagree, ",
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
    "the {b} is not to be trusted",
    "the {a} decides, not the {b}",
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


# What an instruction is learned from first: it names the source to follow and nothing else.
SIMPLE_ACTIONS = tuple(action for action in ACTIONS if "{b}" not in action)


def instruction(rng: random.Random, side: str, template: str | None = None, breadth: float = 1.0) -> str:
    """An instruction toward 'text' or 'vision': the paper's four times in ten, else one of the training wordings.

    `breadth` is the share of this full range; the rest are simple instructions that name only the source to follow.
    `template` (with {a} and {b}) replaces the draw, for wordings held out from training.
    """
    simple = template is None and rng.random() >= breadth
    if template is None and not simple and rng.random() < 0.4:
        return TOWARD_TEXT if side == "text" else TOWARD_VISION
    text, image = rng.choice(TEXT_NAMES), rng.choice(IMAGE_NAMES)
    a, b = (text, image) if side == "text" else (image, text)
    x, y = rng.choice(((a, b), (b, a)))
    if simple:
        template = rng.choice(SIMPLE_ACTIONS) + "."
    elif template is None:
        template = rng.choice(CONDITIONS) + rng.choice(ACTIONS) + "."
    filled = template.format(a=a, b=b, x=x, y=y)
    return filled[0].upper() + filled[1:]
