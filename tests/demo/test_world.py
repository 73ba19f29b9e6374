"""Scenes: the facts that hold in them, what is drawn, and the split into training and held-out."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from demo.world.scenes import BACKGROUNDS, COLOURS, Fact, Scene, Thing, facts, random_scene, render, squash

SCENE = Scene(
    "pink", (Thing(0, "star", "red"), Thing(4, "star", "blue"), Thing(5, "ring", "red"), Thing(8, "K", "black"))
)


def test_facts_are_exactly_the_unambiguous_ones():
    assert set(facts(SCENE)) == {
        Fact("background", "", "pink", None),
        Fact("count", "", "3", None),
        Fact("countof", "star", "2", None),
        Fact("countof", "ring", "1", None),
        Fact("color", "ring", "red", 5),  # two stars: neither their colour nor their place is a fact
        Fact("position", "ring", "right", 5),
        Fact("shape", "blue", "star", 4),  # two red things: not what is red
        Fact("at", "top left", "red star", 0),
        Fact("at", "center", "blue star", 4),
        Fact("at", "right", "red ring", 5),
        Fact("letter", "", "K", 8),
    }


@pytest.mark.parametrize("size", [(84, 84), (168, 168), (300, 120), (90, 200)])
def test_the_picture_shows_the_things_at_their_cells_in_their_colours(size):
    picture = np.asarray(render(SCENE, size)).astype(int)
    width, height = size
    assert picture.shape == (height, width, 3)

    def at(cell: int) -> tuple[int, ...]:
        row, column = divmod(cell, 3)
        return tuple(picture[int((row + 0.5) * height / 3), int((column + 0.5) * width / 3)])

    assert at(0) == COLOURS["red"]
    assert at(4) == COLOURS["blue"]
    assert at(5) == BACKGROUNDS["pink"]  # the hole of the ring
    assert at(1) == at(2) == at(3) == at(6) == at(7) == BACKGROUNDS["pink"]
    assert tuple(picture[0, 0]) == BACKGROUNDS["pink"]


def test_a_picture_of_any_size_is_squashed_to_the_models_grid():
    assert squash(render(SCENE, (400, 300))).size == (84, 84)


def test_too_small_a_picture_is_refused():
    with pytest.raises(ValueError, match="24 x 24"):
        render(SCENE, (10, 84))


def test_the_same_seed_gives_the_same_scenes_and_jitter():
    def draw(seed: int) -> list[bytes]:
        rng = random.Random(seed)
        return [render(random_scene(rng), rng=rng).tobytes() for _ in range(5)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_training_and_held_out_scenes_are_disjoint():
    rng = random.Random(0)
    trained = {random_scene(rng, held_out=False) for _ in range(2000)}
    held_out = {random_scene(rng, held_out=True) for _ in range(300)}
    assert trained.isdisjoint(held_out)
    assert sum(random_scene(rng).held_out for _ in range(2000)) == pytest.approx(200, abs=60)


def test_a_scene_of_nine_shapes_fills_the_grid():
    scene = random_scene(random.Random(1), shapes=8, glyph=True)
    assert len(scene.things) == 9
    assert scene.free_cells == []


def test_a_scene_is_drawn_without_what_models_need() -> None:
    """The README's first command must not import torch, which takes longer to load than all else in it."""
    drawn = "import sys, demo.command, demo.world.conflicts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", drawn], check=False).returncode == 0
