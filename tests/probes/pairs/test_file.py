"""Files of pairs: what they may hold, and one sentence with the line for what they may not."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from probes.pairs.build import LEAST_PICTURES, too_few
from probes.pairs.file import Check, Rule, different, load
from probes.vector.direction import LEAST
from tests.probes.pairs.writing import image, user, write


def png(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def test_messages_texts_and_pictures_become_chats(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(png("red"))
    url = "data:image/png;base64," + base64.b64encode(png("blue")).decode()
    rows = [
        {"toward": "Be polite.", "away": [{"role": "system", "content": "You are rude."}, *user("Hello.")]},
        {
            "toward": user([image("pictures/red.png"), {"type": "text", "text": "What is it?"}]),
            "away": user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}]),
        },
    ]
    first, second = load(write(tmp_path, rows))
    assert (first.line, second.line) == (1, 2)
    assert first.toward.chat() == user("Be polite.")
    assert [message["role"] for message in first.away.chat()] == ["system", "user"]
    for prompt, colour in ((second.toward, (255, 0, 0)), (second.away, (0, 0, 255))):
        picture, text = prompt.chat()[0]["content"]
        assert picture["image"].getpixel((3, 3)) == colour
        assert text == {"type": "text", "text": "What is it?"}


def test_pairs_are_told_apart_by_texts_and_by_what_pictures_hold(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "red"), ("c", "blue")):
        (tmp_path / f"{name}.png").write_bytes(png(colour))

    def row(name: str, text: str) -> dict[str, Any]:
        return {"toward": user([image(name), {"type": "text", "text": f"{text} Be polite."}]), "away": text}

    pairs = load(write(tmp_path, [row("a.png", "x"), row("b.png", "x"), row("c.png", "x"), row("a.png", "y")]))
    assert [pair.line for pair in different(pairs)] == [1, 3, 4]


def test_too_few_pairs_and_too_few_pictures_are_doubted(tmp_path: Path) -> None:
    for number in range(LEAST_PICTURES):
        (tmp_path / f"{number}.png").write_bytes(png(f"#0000{number:02x}"))

    def pairs(count: int, pictures: int) -> list[str]:
        rows = [
            {side: user([image(f"{n % pictures}.png"), {"type": "text", "text": f"{n} {side}"}]) for side in SIDES}
            for n in range(count)
        ]
        return too_few(different(load(write(tmp_path, rows))))

    assert pairs(4, 1) == [
        "There are too few different pairs: 4; at least 16 are needed.",
        "All pairs show one image; at least 4 different images are needed.",
    ]
    assert len(pairs(LEAST - 1, LEAST_PICTURES)) == len(pairs(LEAST, LEAST_PICTURES - 1)) == 1
    assert pairs(LEAST, LEAST_PICTURES) == []
    (doubt,) = too_few([], held_back=6)
    assert "0 besides the 6 held back for the calibration" in doubt
    texts = [{side: f"{n} {side}" for side in SIDES} for n in range(LEAST)]
    assert too_few(load(write(tmp_path, texts))) == []
    assert len(too_few(different(load(write(tmp_path, texts[:4] * 10))))) == 1


SIDES = ("toward", "away")
GOOD = {"toward": "Be polite.", "away": "Be rude."}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([1], "it must be an object"),
        ({"toward": "x"}, "'away' is missing"),
        (GOOD | {"side": 1}, "'side' is unknown; there are away, expect, question, toward"),
        ({"toward": "x", "away": "x"}, "both sides are the same"),
        (GOOD | {"toward": []}, "'toward' must be a list of messages"),
        (GOOD | {"toward": " "}, "'toward[0].content' must be a string or a list of parts, not empty"),
        (GOOD | {"toward": [{"role": "tool", "content": "x"}]}, "'toward[0]' must have a 'role' of system, user, assistant"),
        (GOOD | {"away": [{"role": "assistant", "content": "x"}]}, "the last message of 'away' must be the user's"),
        (GOOD | {"toward": [{"role": "user", "content": [{"type": "sound"}]}]}, "'toward[0].content[0]' must be"),
        (GOOD | {"toward": [{"role": "user", "content": [image("none.png")]}]}, "there is no file"),
        (GOOD | {"toward": [{"role": "user", "content": [image("pairs.jsonl")]}]}, "holds no readable image"),
        (GOOD | {"toward": [{"role": "user", "content": [image("http://a.b/c.png")]}]}, "remote images are not fetched"),
        (GOOD | {"toward": [{"role": "user", "content": [image("data:image/png;base64,!")]}]}, "a data: URL must be"),
        (GOOD | {"toward": [{"role": "user", "content": [image("data:image/png;base64,AAAA")]}]}, "holds no readable image"),
        (GOOD | {"toward": {"states": "none.safetensors"}}, "'toward.states': there is no file"),
        (GOOD | {"toward": {"states": "pairs.jsonl"}}, "is no safetensors file with a tensor 'states'"),
        (GOOD | {"toward": {"states": "flat.safetensors"}}, "has states of shape [6], not (layers, positions, d)"),
        (GOOD | {"toward": {"states": "odd.safetensors"}}, "odd.safetensors has states that are not finite numbers"),
        (GOOD | {"away": {"states": "some.safetensors"}}, "has layers [0, 2]; states of all layers are needed"),
        (GOOD | {"away": {"states": "some.safetensors", "x": 1}}, "'away' must be a list of messages"),
        (GOOD | {"question": "x"}, "'question' and 'expect' need each other"),
        (GOOD | {"question": "x", "expect": {"toward": "a"}}, "'expect' must be"),
        (GOOD | {"question": "x", "expect": {"toward": "a", "away": ""}}, "'expect' must be"),
        (GOOD | {"question": "x", "expect": {"toward": "a", "away": "A "}}, "'expect' is the same for both sides"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence_with_its_line(tmp_path: Path, row: object, why: str) -> None:
    save_file({"states": torch.zeros(6)}, tmp_path / "flat.safetensors")
    save_file({"states": torch.tensor([[0.0, torch.nan]])}, tmp_path / "odd.safetensors")
    save_file({"states": torch.zeros(2, 1, 6)}, tmp_path / "some.safetensors", {"layers": "[0, 2]"})
    path = write(tmp_path, [GOOD, row])
    with pytest.raises(ValueError, match="line 2") as error:
        load(path)
    said = str(error.value)
    assert said.startswith(f"{path}, line 2: ")
    assert why in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'\n{"toward": "x", "away"\n', "line 2: it is not JSON"),
        (b"\xff\xfe\n", "line 1: it is not UTF-8 text"),
        (b"[" * 100_000, "line 1: "),
        (b"\n \n", "holds no pairs"),
    ],
)
def test_what_is_no_jsonl_is_told(tmp_path: Path, text: bytes, why: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=why):
        load(path)


@pytest.mark.parametrize(
    ("answer", "rule", "side"),
    [
        ("Yes, gladly.", "holds", "toward"),
        ("I say: NO!", "holds", "away"),
        ("Yes and no.", "holds", None),
        ("Nobody knows.", "holds", None),
        ("Yes and no.", "begins", "toward"),
        (" *no*, yes", "begins", "away"),
        ("Well, no.", "begins", None),
        ("Yesterday", "begins", None),
        ("", "begins", None),
    ],
)
def test_an_answer_is_the_sides_whose_text_it_has(tmp_path: Path, answer: str, rule: Rule, side: str | None) -> None:
    (pair,) = load(write(tmp_path, [GOOD | {"question": "Well?", "expect": {"toward": "yes", "away": "no"}}]))
    assert isinstance(pair.test, Check)
    assert pair.test.side(answer, rule) == side
    assert json.loads((tmp_path / "pairs.jsonl").read_text())["question"] == "Well?"
