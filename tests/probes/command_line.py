"""The commands as a user runs them, and the files that they read and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from PIL import Image

from probes import command
from probes.conflicts.samples import ConflictSample
from probes.harness import options
from tests.probes.conftest import make_samples


def demo_samples(count: int, seed: int) -> list[ConflictSample]:
    return make_samples(count, shade=seed % 256)


def run(*words: str) -> int:
    app = typer.Typer()
    command.register(app)
    return options.run(
        app, [str(word) for word in words], options.Defaults("nothing", draw={"conflicts": demo_samples})
    )


def last_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line that a failed command ends with."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def strict(path: Path) -> dict[str, Any]:
    """Parse a JSON file, rejecting NaN and infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(constant)

    return dict(json.loads(path.read_text(), parse_constant=refuse))


def write_mc2(folder: Path, count: int) -> list[str]:
    """Write a file of `count` rows, with alternating tasks and their images, and return the options that name them."""
    images = folder / "coco" / "val2014"
    images.mkdir(parents=True)
    rows = []
    for number in range(count):
        Image.new("RGB", (56, 56), (number, 5, 90)).save(images / f"COCO_val2014_{number:012}.jpg")
        rows.append({
            "image_id": f"{number:012}", "task": ("color", "sport", "shape")[number % 3],
            "question": f"What color is ball {number}?", "answer_vision": "red", "answer_text": "blue",
            "context": f"Ball {number} is blue.",
        })  # fmt: skip
    (folder / "mc2.json").write_text(json.dumps(rows))
    return ["--mc2", str(folder / "mc2.json"), "--images", str(folder / "coco")]
