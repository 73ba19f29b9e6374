"""Samples with their pictures in other orders, and the chats that are made of them."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from probes.answering.base import Chat
from probes.stme.samples import ANCHOR, CAPTION, WHICH, TargetSample

COLOURS = ("red", "green", "blue", "white")
PICTURES = tuple(Image.new("RGB", (40, 20), colour) for colour in COLOURS)


def sample(task: str = "TQA", **other: Any) -> TargetSample:
    fields = {
        "texts": ("Image 1:", "Image 2:", "Image 3:", "Is image 3 like image 9?"), "images": PICTURES[:3], "target": 3,
        "response": "image 3",
    }  # fmt: skip
    return TargetSample("7", task, **(fields | other))


def shown(chat: Chat) -> list[Any]:
    """Return the texts, and for each picture the colour of its corner."""
    return [part.get("text") or part["image"].getpixel((0, 0)) for part in chat[0]["content"]]


def test_pictures_change_places_and_keep_what_is_said_of_them() -> None:
    original = sample(choices=("image 1", "image 3"))
    moved = original.in_order([2, 0, 1])  # the third one is now the first
    assert [image.getpixel((0, 0)) for image in (moved.picture(k) for k in (1, 2, 3))] == [
        PICTURES[2].getpixel((0, 0)), PICTURES[0].getpixel((0, 0)), PICTURES[1].getpixel((0, 0)),
    ]  # fmt: skip
    assert (moved.target, moved.response, moved.choices) == (1, "image 1", ("image 2", "image 1"))
    assert moved.texts == ("Image 1:", "Image 2:", "Image 3:", "Is image 1 like image 9?")
    back = moved.in_order([1, 2, 0])
    assert back == original


def test_a_bare_number_is_the_targets() -> None:
    assert sample(CAPTION, response="3").in_order([0, 2, 1]).response == "2"
    assert sample(response="3", choices=("3", "4")).in_order([0, 2, 1]).response == "3"  # an option, not a picture


def test_an_anchor_stays_last() -> None:
    anchored = sample(ANCHOR, texts=("",) * 4 + ("Like picture 4?",), images=PICTURES, target=1, response="1")
    moved = anchored.in_order([1, 2, 0])
    assert anchored.candidates == 3
    assert (moved.target, moved.response, moved.texts[-1]) == (3, "3", "Like picture 4?")
    assert moved.picture(4).getpixel((0, 0)) == (255, 255, 255)


def test_pictures_that_their_texts_tell_apart_stay_where_they_are() -> None:
    assert sample().movable
    assert not sample(texts=("Front:", "Left:", "Right:", "What?")).movable


def test_chats_hold_texts_and_pictures_in_order() -> None:
    red, green, blue = (picture.getpixel((0, 0)) for picture in PICTURES[:3])
    original = sample(tail=" Why?")
    labels = ("Image 1:", red, "Image 2:", green, "Image 3:")
    assert shown(original.chat()) == [*labels, blue, "Is image 3 like image 9? Why?"]
    assert shown(original.which()) == [*labels, blue, f"Is image 3 like image 9?\n{WHICH}"]
    assert shown(original.without(3)) == [*labels, (128, 128, 128), "Is image 3 like image 9? Why?"]
    assert original.blind() == [{"role": "user", "content": "Image 1:Is image 3 like image 9? Why?"}]
    assert shown(sample(CAPTION, response="3").which())[-1] == "Is image 3 like image 9?"


def test_large_pictures_are_scaled_down() -> None:
    assert sample(pixels=200).picture(1).size == (20, 10)
    assert sample(pixels=800).picture(1).size == (40, 20)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"texts": ("", "")}, "sample 7: 3 pictures have 1 places"),
        ({"target": 4}, "sample 7: the target 4 is none of 3 pictures"),
    ],
)
def test_invalid_samples_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(**wrong)


def test_the_anchor_is_no_target() -> None:
    with pytest.raises(ValueError, match="the target 3 is none of 2 pictures"):
        sample(ANCHOR)
