"""A tiny random model behind an engine, and made-up samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

import steering
from probes.mc2 import Sample
from tests import families


@pytest.fixture(scope="session")
def tiny(root: Path) -> steering.Engine:
    folder = families.checkpoint("qwen2_vl", root)
    return steering.Engine(steering.load(folder, device="cpu"), slots=4, max_length=512)


def make_samples(count: int, question: str = "What color is the ball?", shade: int = 0) -> list[Sample]:
    """Samples with pictures of one colour each; the tasks alternate."""
    return [
        Sample(
            id=str(i),
            task=("color", "shape")[i % 2],
            image=Image.new("RGB", (56, 56), (40 * i % 256, shade, 90)),
            question=question,
            answer_vision="red",
            answer_text="blue",
            context=f"The ball number {i} is blue.",
        )
        for i in range(count)
    ]
