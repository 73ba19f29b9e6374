"""Raw pixels become exactly the pixels of transformers' processor, and are used only where they do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import SizeDict

import steering
from steering.model.images import PIXELS, joined
from steering.model.processing.raw_pixels import RawPixels
from steering.prompt.layout import build_prompt
from tests import families
from tests.steering.conftest import LoadMLLM

WITH_TABLES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
SIZES = ((56, 56), (112, 84), (57, 83), (300, 20), (640, 480), (9, 9))


@pytest.fixture
def images(root: Path) -> Any:
    """Load an image processor of the test's own, as transformers has it."""
    images = steering.load(families.checkpoint("qwen2_vl", root), device="cpu").processor.image_processor
    images.__class__ = type(images).__mro__[1]
    return images


def raw_of(images: Any) -> RawPixels:
    return RawPixels(SimpleNamespace(image_processor=images), type(images).__call__)


def noise(size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", WITH_TABLES)
def test_pixels_and_grids_are_those_of_the_processor(
    family: str, size: tuple[int, int], load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = load_mllm(family).processor.image_processor
    monkeypatch.setattr(images, "__class__", type(images).__mro__[1])
    wide = {edge: 4 * images.size[edge] for edge in ("shortest_edge", "longest_edge")}
    for arguments in ({}, {"size": wide, "return_tensors": "pt"}):
        picture = raw_of(images).picture(noise(size), arguments)
        expected = images([noise(size)], **{**arguments, "return_tensors": "pt"})
        assert picture is not None
        assert picture.tensors[PIXELS].dtype == torch.uint8
        assert picture.values == expected[PIXELS].numel()
        assert picture.tensors.keys() == expected.keys()
        assert all(torch.equal(picture.read(name), value) for name, value in expected.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"do_rescale": False, "do_normalize": False},
        {"image_mean": [0.1, 0.9, 0.4], "image_std": [0.3, 2.0, 1e-3]},
        {"resample": Image.Resampling.BILINEAR},
        {"temporal_patch_size": 1},
        {"temporal_patch_size": 3},
        {"merge_size": 4},
        {"patch_size": 8, "merge_size": 1},
        {"size": SizeDict(shortest_edge=3920, longest_edge=5600)},
        {"size": SizeDict(shortest_edge=65_536, longest_edge=16_384)},
    ],
    ids=str,
)
def test_a_table_is_learnt_of_other_settings(settings: dict[str, Any], images: Any) -> None:
    for name, value in settings.items():
        setattr(images, name, value)
    raw, extremes = raw_of(images), Image.new("RGB", (224, 224), (0, 255, 128))
    for image in (noise((100, 75)), extremes):
        picture = raw.picture(image, {})
        assert picture is not None
        assert torch.equal(picture.read(PIXELS), images([image], return_tensors="pt")[PIXELS])


@pytest.mark.parametrize(
    "change", ["by place", "by neighbour", "by frame", "where it resizes", "of another shape", "without resizing"]
)
def test_a_processor_without_a_table_is_asked(change: str, images: Any) -> None:
    plain = type(images).__call__
    images.do_resize = change != "without resizing"

    def changed(self_: Any, pictures: Any, **kwargs: Any) -> Any:
        made = plain(self_, pictures, **kwargs)
        pixels, square = made[PIXELS], pictures[0].width == pictures[0].height
        match change:
            case "by place" if square:
                pixels[0] += 1
            case "where it resizes" if not square:
                pixels *= 1.001
            case "by neighbour":
                pixels[:-1] += 1e-3 * pixels[1:]
            case "by frame":
                pixels.view(len(pixels), 3, 2, -1)[:, :, 1] += 1
            case "of another shape":
                made[PIXELS] = pixels[:, :-1]
        return made

    assert RawPixels(SimpleNamespace(image_processor=images), changed).picture(noise((56, 56)), {}) is None


def test_other_arguments_and_processors_have_none(images: Any, load_mllm: LoadMLLM) -> None:
    assert raw_of(images).picture(noise((56, 56)), {"do_resize": False}) is None
    other = load_mllm("llava").processor.image_processor
    assert raw_of(other).picture(noise((56, 56)), {}) is None


@pytest.mark.parametrize("family", WITH_TABLES)
def test_a_model_encodes_raw_pictures_as_the_processor_s(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    parts = [{"type": "image", "image": noise(size)} for size in SIZES[:3]]
    prompt = build_prompt(mllm, [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}])
    assert [picture.tensors[PIXELS].dtype for picture in prompt.pictures] == [torch.uint8] * 3
    processed = mllm.processor.image_processor([noise(size) for size in SIZES[:3]], return_tensors="pt")
    with torch.inference_mode():
        ours, plain = (mllm.image_features(pictures) for pictures in (joined(prompt.pictures), dict(processed)))
    assert all(map(torch.equal, ours.pooler_output, plain.pooler_output))


def test_bytes_are_copied_to_a_device(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = load_mllm("qwen2_vl")
    parts = [{"type": "image", "image": noise(size)} for size in SIZES[:2]]
    prompt = build_prompt(mllm, [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}])
    copied: list[torch.Tensor] = []
    monkeypatch.setattr("steering.model.images.to_device", lambda tensor, device: copied.append(tensor) or tensor)
    monkeypatch.setattr(mllm.model.model, "get_image_features", lambda **pictures: pictures)
    made = mllm.image_features(joined(prompt.pictures))
    assert made["pixel_values"].dtype == torch.float32
    pixels = [tensor for tensor in copied if len(tensor) == len(prompt.pictures[0].tensors[PIXELS])]
    assert [tensor.dtype for tensor in pixels] == [torch.uint8]
