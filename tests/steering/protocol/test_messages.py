"""Messages as callers of the library give them: files become the pictures they hold, and what is wrong is named."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from steering import RequestError
from steering.protocol.messages import chat_of

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 6, 3), dtype=np.uint8)


def chat(image: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "?"}]}]


def opened(image: Any) -> Image.Image:
    found: Image.Image = chat_of(chat(image))[0]["content"][0]["image"]
    return found


@pytest.mark.parametrize("given", [str, Path, Path.read_bytes])
def test_a_path_or_bytes_are_a_picture(given: Callable[[Path], Any], tmp_path: Path) -> None:
    file = tmp_path / "scene.png"
    Image.fromarray(PIXELS).save(file)
    image = opened(given(file))
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), PIXELS)


def test_a_picture_is_opened_once_and_the_callers_messages_stay(tmp_path: Path) -> None:
    file = tmp_path / "scene.png"
    Image.fromarray(PIXELS).save(file)
    given = chat(file)
    once = chat_of(given)
    file.unlink()
    assert given[0]["content"][0]["image"] == file
    assert chat_of(once) is once


def test_transparency_is_white_and_a_turned_picture_is_upright(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(buffer, "PNG")
    assert opened(buffer.getvalue()).getpixel((0, 0)) == (255, 255, 255)
    turned = Image.fromarray(PIXELS)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned a quarter to the right
    turned.save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(np.asarray(opened(tmp_path / "turned.png")), np.rot90(PIXELS, -1))


@pytest.mark.parametrize(
    ("messages", "param", "said"),
    [
        ("hi", "messages", "a list of messages"),
        (None, "messages", "got None"),
        ({"role": "user"}, "messages", "a list of messages"),
        ([1], "messages[0]", "must be a dict"),
        ([{"content": "x"}], "messages[0].role", "system, user, assistant, tool; got None"),
        ([{"role": "king", "content": "x"}], "messages[0].role", "got 'king'"),
        ([{"role": "user"}], "messages[0].content", "a string or a list of parts; got None"),
        ([{"role": "user", "content": 5}], "messages[0].content", "got 5"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "got 'x'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "text, image"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "a string; got None"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "span": "story"}]}],
            "messages[0].content[0].span",
            "'context'",
        ),
        (chat(3), "messages[0].content[0].image", "a PIL image, the path of a file or its bytes; got 3"),
        (chat(None), "messages[0].content[0].image", "got None"),
        (chat("https://example.com/a.png"), "messages[0].content[0].image", "the path of a file"),
        (chat("data:image/png;base64,AAAA"), "messages[0].content[0].image", "the path of a file"),
        (chat("nowhere.png"), "messages[0].content[0].image", "'nowhere.png' cannot be opened (No such file"),
        (chat(Path("/")), "messages[0].content[0].image", "cannot be opened"),
        (chat(b"no picture"), "messages[0].content[0].image", "10 bytes hold is not a readable image"),
        (chat(b""), "messages[0].content[0].image", "not a readable image"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(messages: Any, param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat_of(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"'{param}'")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250
