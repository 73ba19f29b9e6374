"""The picture world: scenes on a 3 x 3 grid, their rendering at any size, and the facts that hold in them.

A scene has a background and a few things, each in one of nine cells: coloured shapes and at most one letter or
digit. Squashed to 84 x 84 pixels a cell is 28 x 28 pixels, which is exactly one image token of the embedded model.
Scenes are split by a hash of their content: a held-out scene is never shown in training, whatever the seed.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 84
LARGEST = 4096
"""The largest width and height of a picture, which is drawn in 200 MB of memory."""
Size = tuple[int, int]
Mask = Callable[[str, int, float], np.ndarray]
"""Draws a kind of thing in a square of so many pixels at a scale: its coverage (side, side, 1) in 0..1."""

SHAPES = ("circle", "square", "triangle", "star", "heart", "cross", "diamond", "ring")
COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (45, 80, 215),
    "yellow": (240, 215, 50),
    "purple": (135, 50, 165),
    "orange": (245, 135, 30),
    "white": (248, 248, 248),
    "black": (20, 20, 20),
}
BACKGROUNDS = {
    "white": (248, 248, 248),
    "black": (20, 20, 20),
    "gray": (130, 130, 130),
    "pink": (250, 180, 200),
    "cyan": (120, 220, 230),
    "brown": (120, 75, 40),
}
POSITIONS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
LETTERS = tuple("ABCEHKMRSTXZ")
DIGITS = tuple("0123456789")
# Drawable things that no training scene shows: a model would have to learn them elsewhere.
UNSEEN_SHAPES = ("pentagon", "hexagon", "arrow", "moon")
UNSEEN_COLOURS = {"teal": (0, 120, 120), "magenta": (220, 30, 150), "lime": (160, 235, 30)}
UNSEEN_LETTERS = tuple("DFGJLNPQUVWY")

_PAINTS = COLOURS | UNSEEN_COLOURS


class Thing(NamedTuple):
    """A shape, letter or digit: its cell (0-8, row by row), its kind and its colour."""

    cell: int
    kind: str
    colour: str

    @property
    def is_glyph(self) -> bool:
        """True for a letter or a digit, whose kind is the character itself."""
        return len(self.kind) == 1


@dataclass(frozen=True)
class Scene:
    """A background and its things, sorted by cell."""

    background: str
    things: tuple[Thing, ...]

    @property
    def shapes(self) -> list[Thing]:
        return [thing for thing in self.things if not thing.is_glyph]

    @property
    def glyph(self) -> Thing | None:
        return next((thing for thing in self.things if thing.is_glyph), None)

    @property
    def free_cells(self) -> list[int]:
        used = {thing.cell for thing in self.things}
        return [cell for cell in range(9) if cell not in used]

    @property
    def held_out(self) -> bool:
        """True for the tenth of all scenes that training never shows."""
        text = self.background + "".join(f";{t.cell} {t.kind} {t.colour}" for t in self.things)
        return hashlib.blake2b(text.encode(), digest_size=2).digest()[0] % 10 == 0

    def replace(self, old: Thing | None, new: Thing | None) -> Scene:
        """Return the same scene with `old` taken out (if given) and `new` put in (if given)."""
        things = [thing for thing in self.things if thing != old] + ([new] if new else [])
        return Scene(self.background, tuple(sorted(things)))


@dataclass(frozen=True)
class Habits:
    """Regularities of a world's scenes.

    A share `whole` of them show all kinds of one of the `themes`; a theme that is named twice is twice as frequent. The
    others are drawn evenly.
    """

    themes: tuple[tuple[str, ...], ...] = ()
    whole: float = 0.0


EVEN = Habits()
_ROUND, _POINTED = ("circle", "ring", "heart", "cross"), ("square", "triangle", "star", "diamond")
WORLDS = {"even": EVEN, "themes": Habits((_ROUND, _ROUND, _POINTED), 0.85)}
"""The habits of each world by name; a model's helmsight.json names the world in which it was trained."""


class Fact(NamedTuple):
    """A true fact of a scene: the question (`kind`, about `key`), the answer, and the place to look."""

    kind: str
    key: str
    value: str
    cell: int | None


def allowed_colours(background: str) -> list[str]:
    """Return the shape colours that stand out from a background."""
    return [c for c in COLOURS if c != background and (background, c) != ("brown", "orange")]


def glyph_colour(background: str) -> str:
    """Return the colour of letters and digits: white on dark backgrounds, black on light ones."""
    return "white" if background in ("black", "brown", "gray") else "black"


def random_scene(
    rng: random.Random,
    shapes: int | None = None,
    glyph: bool | None = None,
    held_out: bool | None = None,
    habits: Habits = EVEN,
) -> Scene:
    """Return a scene with a number of shapes (default 1 to 4), with or without a letter or digit (default one in three).

    `held_out` asks for a scene of the held-out tenth (True), of the training part (False) or of either (None). Where
    `habits` call for a theme, it decides the number.
    """
    while True:
        theme = rng.choice(habits.themes) if habits.themes and rng.random() < habits.whole else None
        scene = _draw_scene(rng, shapes if shapes is not None else rng.choice((1, 2, 2, 3, 3, 4)), glyph, theme)
        if held_out is None or scene.held_out is held_out:
            return scene


def breaking_scene(rng: random.Random, habits: Habits) -> Scene:
    """Return a held-out scene that lacks something that belongs there by the habits.

    In half of them something that does not belong there shows, too.
    """
    theme = rng.choice(habits.themes)
    strange = [kind for kind in SHAPES if kind not in theme]
    while True:
        kinds = rng.sample(theme, len(theme) - 1) + rng.sample(strange, rng.choice((0, 1)))
        if (scene := _draw_scene(rng, len(kinds), None, kinds)).held_out:
            return scene


def _draw_scene(rng: random.Random, count: int, glyph: bool | None, kinds: Sequence[str] | None = None) -> Scene:
    if kinds is not None:
        count = len(kinds)
    background = rng.choice(list(BACKGROUNDS))
    colours = allowed_colours(background)
    cells = rng.sample(range(9), min(9, count + 1))
    if kinds is None:
        kinds = rng.sample(SHAPES, min(count, len(SHAPES)))
        if rng.random() < 0.35:  # some scenes repeat a shape, so that counting one kind means something
            kinds = [kinds[0] if i and rng.random() < 0.5 else kind for i, kind in enumerate(kinds)]
    things = [Thing(cell, kind, rng.choice(colours)) for cell, kind in zip(cells, kinds, strict=False)]
    if count < 9 and (glyph if glyph is not None else rng.random() < 0.35):
        things.append(Thing(cells[count], rng.choice(LETTERS + DIGITS), glyph_colour(background)))
    return Scene(background, tuple(sorted(things)))


def facts(scene: Scene) -> list[Fact]:
    """Return every fact of a scene that has one unambiguous answer, in a fixed order."""
    shapes = scene.shapes
    kinds = [thing.kind for thing in shapes]
    colours = [thing.colour for thing in shapes]
    all_facts = [Fact("background", "", scene.background, None), Fact("count", "", str(len(shapes)), None)]
    all_facts += [Fact("countof", kind, str(kinds.count(kind)), None) for kind in dict.fromkeys(kinds)]
    for cell, kind, colour in shapes:
        if kinds.count(kind) == 1:
            all_facts.append(Fact("color", kind, colour, cell))
            all_facts.append(Fact("position", kind, POSITIONS[cell], cell))
        if colours.count(colour) == 1:
            all_facts.append(Fact("shape", colour, kind, cell))
        all_facts.append(Fact("at", POSITIONS[cell], f"{colour} {kind}", cell))
    if glyph := scene.glyph:
        all_facts.append(Fact("letter" if glyph.kind.isalpha() else "number", "", glyph.kind, glyph.cell))
    return all_facts


def render(
    scene: Scene, size: Size = (SIDE, SIDE), rng: random.Random | None = None, mask_of: Mask | None = None
) -> Image.Image:
    """Draw a scene at any (width, height); shapes keep their aspect, the grid fills the picture.

    With `rng`, colours, sizes and positions are jittered as in training; without, the drawing is exact. `mask_of` replaces
    `drawn`.
    """
    return Image.fromarray(render_array(scene, size, rng, mask_of))


def render_array(
    scene: Scene, size: Size = (SIDE, SIDE), rng: random.Random | None = None, mask_of: Mask | None = None
) -> np.ndarray:
    """Return `render` as an array of shape (height, width, 3), uint8."""
    width, height = size
    if width < 24 or height < 24:
        raise ValueError(f"size {size}: a picture needs at least 24 x 24 pixels")
    if max(size) > LARGEST:
        raise ValueError(f"size {size}: a picture may have at most {LARGEST} x {LARGEST} pixels")
    unit = min(width, height) / SIDE  # pixels of this picture in one pixel of the 84 x 84 picture
    picture = np.empty((height, width, 3), np.float32)
    picture[:] = _tint(BACKGROUNDS[scene.background], rng)
    for cell, kind, colour in scene.things:
        diameter = rng.choice((17, 19, 21)) if rng else 19
        mask = (mask_of or drawn)(kind, round(24 * unit), diameter / 24)
        row, column = divmod(cell, 3)
        shift_y, shift_x = (rng.uniform(-2, 2), rng.uniform(-2, 2)) if rng else (0.0, 0.0)
        top = round((row + 0.5) * height / 3 + shift_y * unit - mask.shape[0] / 2)
        left = round((column + 0.5) * width / 3 + shift_x * unit - mask.shape[1] / 2)
        top, left = max(0, min(top, height - mask.shape[0])), max(0, min(left, width - mask.shape[1]))
        patch = picture[top : top + mask.shape[0], left : left + mask.shape[1]]
        patch += mask * (np.asarray(_tint(_PAINTS[colour], rng), np.float32) - patch)
    return picture.round().clip(0, 255).astype(np.uint8)


def squash(picture: Image.Image, side: int = SIDE) -> Image.Image:
    """Resize a picture as the server does before the processor: bicubic, to a square, without padding."""
    return picture if picture.size == (side, side) else picture.resize((side, side), Image.Resampling.BICUBIC)


def _tint(colour: tuple[int, int, int], rng: random.Random | None) -> tuple[int, ...]:
    if rng is None:
        return colour
    return tuple(max(0, min(255, value + rng.randint(-14, 14))) for value in colour)


@functools.lru_cache(maxsize=4096)
def drawn(kind: str, side: int, scale: float) -> np.ndarray:
    """Return the coverage mask (side, side, 1) in 0..1 of one thing, drawn four times larger and averaged down."""
    big = side * 4
    image = Image.new("L", (big, big), 0)
    draw = ImageDraw.Draw(image)
    c, r = big / 2, big / 2 * scale
    if kind == "circle":
        draw.ellipse((c - r, c - r, c + r, c + r), fill=255)
    elif kind == "square":
        draw.rectangle((c - 0.87 * r, c - 0.87 * r, c + 0.87 * r, c + 0.87 * r), fill=255)
    elif kind == "triangle":
        draw.polygon(_polygon(3, 1.1 * r, c, c + 0.2 * r), fill=255)
    elif kind == "star":
        draw.polygon(_polygon(5, 1.1 * r, c, c, inner=0.42), fill=255)
    elif kind == "diamond":
        draw.polygon([(c, c - 1.1 * r), (c + 0.75 * r, c), (c, c + 1.1 * r), (c - 0.75 * r, c)], fill=255)
    elif kind in ("pentagon", "hexagon"):
        draw.polygon(_polygon(5 if kind == "pentagon" else 6, 1.1 * r, c, c), fill=255)
    elif kind == "arrow":
        draw.polygon([(c, c - r), (c + r, c), (c - r, c)], fill=255)
        draw.rectangle((c - 0.33 * r, c, c + 0.33 * r, c + r), fill=255)
    elif kind == "moon":
        draw.ellipse((c - r, c - r, c + r, c + r), fill=255)
        draw.ellipse((c - 0.3 * r, c - 0.9 * r, c + 1.5 * r, c + 0.9 * r), fill=0)
    elif kind == "cross":
        w = 0.33 * r
        draw.rectangle((c - w, c - r, c + w, c + r), fill=255)
        draw.rectangle((c - r, c - w, c + r, c + w), fill=255)
    elif kind == "ring":
        draw.ellipse((c - r, c - r, c + r, c + r), fill=255)
        draw.ellipse((c - 0.55 * r, c - 0.55 * r, c + 0.55 * r, c + 0.55 * r), fill=0)
    elif kind == "heart":
        draw.polygon(_heart(r, c), fill=255)
    else:
        font = ImageFont.load_default(big * scale * 1.15)
        draw.text((c, c), kind, fill=255, font=font, anchor="mm", stroke_width=max(1, big // 48))
    mask = np.asarray(image.resize((side, side), Image.Resampling.BOX), np.float32)[..., None] / 255
    mask.flags.writeable = False
    return mask


def _polygon(corners: int, radius: float, x: float, y: float, inner: float | None = None) -> list[tuple[float, float]]:
    """Return the corners of a regular polygon with one corner up, or of a star with inner corners at `inner` x radius."""
    count = corners * (2 if inner else 1)
    points = []
    for i in range(count):
        angle = 2 * math.pi * i / count - math.pi / 2
        reach = radius * inner if inner and i % 2 else radius
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def _heart(radius: float, centre: float) -> list[tuple[float, float]]:
    points = []
    for i in range(60):
        t = 2 * math.pi * i / 60
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((centre + x / 16 * radius, centre - y / 16 * radius - 0.05 * radius))
    return points
