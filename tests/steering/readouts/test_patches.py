"""Overlays: strong where the map is, the picture itself where it is not."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from steering import Diagnose, Request, Sampling
from steering.readouts.patches import SIDE, data_url, overlay
from tests import families
from tests.steering.conftest import MakeEngine


def test_the_strongest_patch_is_bright_and_the_weakest_as_it_was() -> None:
    picture = Image.new("RGB", (90, 60), (10, 120, 200))
    values = torch.zeros(6)
    values[2] = 3.0  # the first row's last
    out = np.asarray(overlay(picture, values, (2, 3)))
    assert out.shape == (60, 90, 3)
    assert out[55, 5].tolist() == [10, 120, 200]
    strongest = 0.25 * np.array([10, 120, 200]) + 0.75 * np.array([252, 255, 164])
    assert np.abs(out[5, 85] - strongest).max() <= 12  # smooth edges reach a little into the corner


def test_a_flat_map_leaves_the_picture_and_big_pictures_become_small() -> None:
    picture = Image.new("RGB", (3000, 1500), "red")
    out = overlay(picture, torch.ones(4), (2, 2))
    assert out.size == (SIDE, SIDE // 2)
    assert bool((np.asarray(out) == (255, 0, 0)).all())


def test_heatmaps_come_for_every_image_of_the_request(make_engine: MakeEngine) -> None:
    chat = families.example_messages("qwen2_vl", 2)
    diagnose = Diagnose(frozenset(), last_layers=1, heatmaps=True)
    (choice,) = make_engine("qwen2_vl").generate([Request(chat, Sampling(max_tokens=3), diagnose=diagnose)])[0].choices
    asked = Diagnose(frozenset({"patches"}), last_layers=1)
    (maps,) = make_engine("qwen2_vl").generate([Request(chat, Sampling(max_tokens=3), diagnose=asked)])[0].choices
    assert choice.diagnostics is not None
    assert maps.diagnostics is not None
    assert "patches" not in choice.diagnostics
    pictures = [part["image"] for part in chat[0]["content"] if part["type"] == "image"]
    for number, (heat, patches) in enumerate(
        zip(choice.diagnostics["heatmaps"], maps.diagnostics["patches"], strict=True), start=1
    ):
        assert (heat["image"], heat["kind"], heat["layers"]) == (number, "rho", [2])
        shown = Image.open(io.BytesIO(base64.b64decode(heat["png"].removeprefix("data:image/png;base64,"))))
        assert shown.size == pictures[number - 1].size
        grid = choice.diagnostics["images"][number - 1]["grid"]
        expected = overlay(pictures[number - 1], torch.tensor(patches["rho"][0]), (grid[0], grid[1]))
        assert np.array_equal(np.asarray(shown), np.asarray(expected))


def test_images_without_a_grid_have_none(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steering.front.input_processor.tiling_of", lambda *args: None)
    request = Request(
        families.example_messages("llava_next", 1),
        Sampling(max_tokens=2),
        diagnose=Diagnose(frozenset(), heatmaps=True),
    )
    (choice,) = make_engine("llava_next").generate([request])[0].choices
    assert choice.diagnostics is not None
    assert choice.diagnostics["heatmaps"] == [{"image": 1, "kind": "rho", "layers": [0, 1, 2], "png": None}]


def test_a_data_url_holds_a_png() -> None:
    url = data_url(Image.new("RGB", (2, 2), "blue"))
    assert Image.open(io.BytesIO(base64.b64decode(url.split(",")[1]))).getpixel((1, 1)) == (0, 0, 255)
