"""The questions that `smol` learns from: to see and to describe; never a conflict, and no instruction to follow a side."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from demo.model.forward import IMAGE_TOKENS, branch_mask
from demo.model.tokenizer import IMAGE_TOKEN, TURN_END
from demo.smol.things import THINGS, render_things, thing_scene
from demo.world.questions import SceneQuestion, description, existence, lookup, open_question, options
from demo.world.scenes import COLOURS, SIDE, Scene, facts, random_scene, render

GRID = 3
"""The tokens of an image stand in a square of this side."""
QUESTION = "\0"


def is_coloured(rng: random.Random, scene: Scene) -> SceneQuestion | None:
    """Return a question whether a shape has a colour, half of the time its own; every other colour is as likely."""
    colours = [fact for fact in facts(scene) if fact.kind == "color"]
    if not colours:
        return None
    _, shape, colour, cell = rng.choice(colours)
    if rng.random() < 0.5:
        named, answer = colour, f"Yes, the {shape} is {colour}."
    else:
        named, answer = rng.choice([other for other in COLOURS if other != colour]), f"No, the {shape} is {colour}."
    return SceneQuestion("is", ((f"Is the {shape} {named}?", answer),), cell=cell)


Maker = Callable[[random.Random, Scene], SceneQuestion | None]
YES_NO = ("exists", "is", "thing exists", "thing is")
SHORT = 0.5
"""The share of answers to yes/no questions that are one word: in a sentence that word has little weight."""
MAKERS: dict[str, tuple[float, Maker]] = {
    **{kind: (1.5, partial(open_question, kind=kind)) for kind in ("color", "shape", "position", "at")},
    **{
        kind: (0.7, partial(open_question, kind=kind))
        for kind in ("background", "count", "countof", "letter", "number")
    },
    "exists": (2.5, partial(existence, yes=0.5)),
    "is": (3.0, is_coloured),
    "describe": (1.0, description),
    "options": (1.5, partial(options, count=2)),
    "options_more": (0.5, partial(options, count=4)),
    "lookup": (1.0, lambda rng, scene: lookup(rng)),
}
"""How often each kind of question about shapes is drawn, and its maker; half of the yes/no questions are for yes."""
THING_MAKERS: dict[str, tuple[float, Maker]] = {
    **{f"thing {kind}": (1.5, partial(open_question, kind=kind)) for kind in ("color", "shape", "position", "at")},
    "thing exists": (2.5, partial(existence, yes=0.5, kinds=tuple(THINGS), nouns=())),
    "thing is": (3.0, is_coloured),
    "thing describe": (1.0, description),
}
"""The same for pictures of things that have a usual colour."""
SHARE_OF_THINGS = 0.45
KINDS = (*MAKERS, *THING_MAKERS)


@dataclass(frozen=True)
class Exercise:
    """A question with its answer."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class AskedScene:
    """A picture with questions about it."""

    picture: Image.Image
    examples: tuple[Exercise, ...]


def draw(rng: random.Random, count: int, held_out: bool = False) -> AskedScene:
    """Draw a picture with `count` questions; held-out scenes are never drawn in training, and are rendered exactly."""
    things = rng.random() < SHARE_OF_THINGS
    scene = thing_scene(rng, held_out=held_out) if things else random_scene(rng, held_out=held_out)
    makers, rendered = (THING_MAKERS, render_things) if things else (MAKERS, render)
    examples: list[Exercise] = []
    while len(examples) < count:
        kind = rng.choices(list(makers), [weight for weight, _ in makers.values()])[0]
        if (scene_question := makers[kind][1](rng, scene)) is not None:
            ((question, answer),) = scene_question.turns
            if kind not in YES_NO and any(question == example.question for example in examples):
                continue  # of yes/no questions fewer are for yes: without repeats, more than half would be for no
            if kind in YES_NO and rng.random() < SHORT:
                answer = answer.split(",")[0] + "."
            examples.append(Exercise(kind, question, answer))
    return AskedScene(rendered(scene, (SIDE, SIDE), None if held_out else rng), tuple(examples))


def encode(tokenizer: Any, images: Any, pictures: Sequence[AskedScene]) -> tuple[dict[str, Tensor], Tensor]:
    """Return what `answer_logits` takes, a row per picture, and labels (rows, tokens), -100 except on answers.

    The questions about a picture share it, and what stands before them: each is a branch that sees no other one.
    tokenizer: with a chat template. images: the image processor.
    """
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    before, behind = prompt.replace(IMAGE_TOKEN, IMAGE_TOKEN * IMAGE_TOKENS).split(QUESTION)

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    prefix, image = ids_of(before), tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    start = prefix.index(image)
    places = _places(len(prefix), start)
    rows = []
    for scene in pictures:
        ids, labels, branches, positions = list(prefix), [-100] * len(prefix), [0] * len(prefix), list(places)
        for number, example in enumerate(scene.examples, 1):
            question, answer = ids_of(example.question + behind), ids_of(example.answer + TURN_END)
            ids += question + answer
            labels += [-100] * len(question) + answer
            branches += [number] * len(question + answer)
            positions += [(places[-1][0] + 1 + k,) * 3 for k in range(len(question + answer))]
        rows.append((ids, labels, branches, positions))
    length = max(len(ids) for ids, *_ in rows)
    pad = tokenizer.convert_tokens_to_ids("<|endoftext|>")

    def padded(part: int, fill: Any) -> Tensor:
        return torch.tensor([[*row[part], *[fill] * (length - len(row[part]))] for row in rows])

    branch = padded(2, -1)
    pixels = images(images=[scene.picture for scene in pictures], return_tensors="pt")
    inputs = {
        "ids": padded(0, pad),
        "positions": padded(3, (0, 0, 0)).permute(2, 0, 1),
        "bias": torch.where(branch_mask(branch.clamp(max=0), branch), 0.0, -1e4)[:, None],
        "is_image": padded(0, pad) == image,
        "pixels": pixels["pixel_values"],
        "grid": pixels["image_grid_thw"],
    }
    return inputs, padded(1, -100)


def _places(length: int, start: int) -> list[tuple[int, int, int]]:
    """Return the positions (time, row, column) of a prefix with an image from `start` on, as Qwen2-VL counts them."""
    places = [(k, k, k) for k in range(start)]
    places += [(start, start + k // GRID, start + k % GRID) for k in range(IMAGE_TOKENS)]
    return places + [(start + GRID + k,) * 3 for k in range(length - start - IMAGE_TOKENS)]
