"""Things that have a usual colour, in scenes that show each in any colour as often: a blue banana contradicts a habit.

`things.png` has their masks, 64 x 64 pixels each, made from Twemoji (npm's `emoji-datasource-twitter` 16.0.0): the opacity
of each picture, less where it is brighter or darker than its median. Graphics copyright Twitter, Inc. and other
contributors, licensed under CC-BY 4.0 (https://creativecommons.org/licenses/by/4.0/).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection
from pathlib import Path

import numpy as np
from PIL import Image

from demo.world.scenes import SIDE, Habits, Scene, Size, Thing, drawn, random_scene, render

THINGS = {
    "strawberry": "red", "tomato": "red", "cherry": "red", "rose": "red",
    "banana": "yellow", "lemon": "yellow", "sun": "yellow",
    "frog": "green", "tree": "green", "cactus": "green", "clover": "green", "broccoli": "green",
    "carrot": "orange", "pumpkin": "orange", "eggplant": "purple",
    "swan": "white", "snowman": "white", "ghost": "white", "spider": "black", "whale": "blue",
}  # fmt: skip
"""The usual colour of each thing, in the order of the sheet. Training shows every colour of it as often."""
SHEET = Path(__file__).parent / "things.png"
PIXELS = 64


def thing_scene(rng: random.Random, count: int | None = None, held_out: bool | None = None) -> Scene:
    """Return a scene of different things (default 1 to 3) in random colours; `held_out` as for `random_scene`."""
    kinds = tuple(rng.sample(list(THINGS), count if count is not None else rng.choice((1, 2, 2, 3))))
    return random_scene(rng, held_out=held_out, habits=Habits((kinds,), 1.0))


def contradicting_scene(rng: random.Random, known: Collection[str]) -> tuple[Scene, Thing]:
    """Return a held-out scene of two or three things, and a thing of it, one of the `known`, without its usual colour."""
    while True:
        scene = thing_scene(rng, rng.choice((2, 3)), held_out=True)
        if things := [t for t in scene.shapes if t.kind in known and t.colour != THINGS[t.kind]]:
            return scene, rng.choice(things)


def render_things(scene: Scene, size: Size = (SIDE, SIDE), rng: random.Random | None = None) -> Image.Image:
    """Draw a scene of things as `render` draws one of shapes."""
    return render(scene, size, rng, mask)


@functools.lru_cache(maxsize=4096)
def mask(kind: str, side: int, scale: float) -> np.ndarray:
    """Return the coverage (side, side, 1) in 0..1 of a thing, a letter or a digit."""
    if kind not in THINGS:
        return drawn(kind, side, scale)
    inner = min(side, round(side * (scale + 0.17)))  # a picture fills its square, a circle of this scale less
    first = list(THINGS).index(kind) * PIXELS
    with Image.open(SHEET) as sheet:
        own = sheet.crop((first, 0, first + PIXELS, PIXELS)).resize((inner, inner), Image.Resampling.BOX)
    image = Image.new("L", (side, side))
    image.paste(own, ((side - inner) // 2,) * 2)
    out = np.asarray(image, np.float32)[..., None] / 255
    out.flags.writeable = False
    return out
