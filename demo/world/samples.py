"""Sample scenes for the playground: pictures with a question, kept beside a checkpoint in `samples/`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.world.scenes import SIDE, Scene, Thing, render


@dataclass(frozen=True)
class PageSample:
    """Scenes by the names of their files, a question about them, and a text that may contradict them."""

    title: str
    scenes: tuple[str, ...]
    question: str
    context: str | None = None


def _scene(background: str, *things: tuple[int, str, str]) -> Scene:
    return Scene(background, tuple(sorted(Thing(*thing) for thing in things)))


_WHITE = _scene("white", (0, "circle", "blue"), (2, "square", "orange"), (4, "star", "green"), (7, "heart", "red"))
SCENES = {
    "cyan": _scene("cyan", (1, "star", "yellow"), (5, "circle", "red"), (6, "heart", "purple")),
    "pink": _scene("pink", (0, "heart", "red"), (4, "triangle", "green"), (7, "square", "blue")),
    "letter": _scene("gray", (2, "cross", "orange"), (4, "K", "white"), (6, "circle", "green")),
    "brown": _scene("brown", (1, "triangle", "yellow"), (3, "circle", "white"), (8, "star", "red")),
    "gray": _scene("gray", (0, "circle", "green"), (5, "cross", "white"), (6, "star", "red")),
    "white": _WHITE,
    "white-moved": _WHITE.replace(Thing(4, "star", "green"), Thing(5, "star", "green")),
    "hearts-1": _scene("pink", (1, "heart", "red"), (3, "square", "blue"), (8, "star", "white")),
    "hearts-2": _scene("cyan", (0, "star", "red"), (4, "heart", "purple"), (5, "square", "black")),
    "hearts-3": _scene("brown", (2, "star", "blue"), (6, "square", "yellow"), (7, "heart", "white")),
}
SAMPLES = (
    PageSample("The text says green", ("cyan",), "What color is the star?", "The star is green."),
    PageSample("The text says diamond", ("pink",), "What is the green object?", "The green object is a diamond."),
    PageSample("Another letter", ("letter",), "What letter is in the picture?", "The letter is A."),
    PageSample("Count against the text", ("brown",), "How many shapes are in the picture?", "There are 5 shapes."),
    PageSample("One of two pictures", ("cyan", "gray"), "Where is the star in picture 2?"),
    PageSample("Which of three", ("hearts-1", "hearts-2", "hearts-3"), "Which picture shows a red star?"),
    PageSample("Spot the difference", ("white", "white-moved"), "What is the difference between the two pictures?"),
    PageSample("Describe it", ("white",), "Describe the picture."),
)


def write_samples(folder: Path, side: int = 4 * SIDE) -> list[Path]:
    """Draw the scenes as pictures of `side` x `side` pixels and write samples.json beside them; return all files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, scene in SCENES.items():
        files.append(folder / f"{name}.png")
        render(scene, (side, side)).quantize(64).save(files[-1], optimize=True)
    files.append(folder / "samples.json")
    rows = [_row(sample) for sample in SAMPLES]
    files[-1].write_text(json.dumps(rows, indent=2) + "\n")
    return files


def _row(sample: PageSample) -> dict[str, Any]:
    row = {"title": sample.title, "images": [f"{name}.png" for name in sample.scenes], "question": sample.question}
    return row if sample.context is None else {**row, "context": sample.context}
