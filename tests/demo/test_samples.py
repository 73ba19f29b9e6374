"""The sample scenes that ship with the embedded model: as drawn by the code, and answered as the scenes are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import steering
from demo.world.samples import SAMPLES, SCENES, PageSample
from demo.world.scenes import SIDE, render
from server.cli import main

CHECKPOINT = Path(__file__).parents[2] / "demo" / "checkpoint"

# What the model says by itself, and, where the text contradicts, what the text makes it say.
PLAIN = ("The star is green.", "The green object is a triangle.", "The letter is A.", "There are 3 shapes.",
         "The star is at the bottom left.", "Picture 2.", "The star moved from the center to the right.",
         "A blue circle at the top left, an orange square at the top right, a green star at the center and a red heart at "
         "the bottom on a white background.")  # fmt: skip
VISION = ("The star is yellow.", "The green object is a triangle.", "The letter is K.", "There are 3 shapes.")
TEXT = ("The star is green.", "The green object is a diamond.", "The letter is A.", "There are 5 shapes.")


def test_the_shipped_files_are_what_the_command_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "samples", "--folder", str(tmp_path)]) == 0
    assert "11 files" in capsys.readouterr().out
    shipped = CHECKPOINT / "samples"
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in shipped.iterdir()}
    assert (tmp_path / "samples.json").read_text() == (shipped / "samples.json").read_text()
    for name in SCENES:
        with Image.open(tmp_path / f"{name}.png") as drawn, Image.open(shipped / f"{name}.png") as kept_image:
            assert drawn.convert("RGB").tobytes() == kept_image.convert("RGB").tobytes()
        assert (shipped / f"{name}.png").stat().st_size < 8192


def test_the_pictures_are_the_scenes() -> None:
    for name, scene in SCENES.items():
        with Image.open(CHECKPOINT / "samples" / f"{name}.png") as image:
            drawn, exact = image.convert("RGB"), render(scene, (4 * SIDE, 4 * SIDE))
        worst = max(abs(a - b) for a, b in zip(drawn.tobytes(), exact.tobytes(), strict=True))
        assert worst <= 24  # 64 colours: edges are rounded, areas are not
        assert drawn.getpixel((2, 2)) == exact.getpixel((2, 2))


def test_every_scene_is_used_and_every_sample_has_one() -> None:
    assert {name for sample in SAMPLES for name in sample.scenes} == set(SCENES)
    written = json.loads((CHECKPOINT / "samples" / "samples.json").read_text())
    assert len({sample["title"] for sample in written}) == len(SAMPLES) == len(PLAIN)


def test_the_model_answers_them() -> None:
    mllm = steering.load(CHECKPOINT, device="cpu")
    vector = steering.VectorStore(CHECKPOINT / "vectors").get("modality-preference")
    conflicts = [sample for sample in SAMPLES if sample.context]
    requests = [asked(sample) for sample in SAMPLES]
    for side in ("vision", "text"):
        requests += [asked(sample, steering.Steer.to(vector, side)) for sample in conflicts]  # type: ignore[arg-type]
    results = steering.Engine(mllm, slots=4, threads=1).generate(requests)
    assert tuple(result.choices[0].text for result in results) == (*PLAIN, *VISION, *TEXT)


def asked(sample: PageSample, *steers: steering.Steer) -> steering.Request:
    """Return the request that the playground sends for a sample."""
    content: list[dict[str, object]] = []
    for name in sample.scenes:
        with Image.open(CHECKPOINT / "samples" / f"{name}.png") as picture:
            content.append({"type": "image", "image": picture.convert("RGB")})
    if sample.context:
        content.append({"type": "text", "text": f"Text context: {sample.context}\n", "span": "context"})
    content.append({"type": "text", "text": sample.question})
    sampling = steering.Sampling(max_tokens=64, temperature=0.0)
    return steering.Request([{"role": "user", "content": content}], sampling, steers)
