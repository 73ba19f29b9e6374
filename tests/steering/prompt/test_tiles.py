"""Tiles are put together where a change of the picture shows in the features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from steering import MLLM, RequestError
from steering.prompt.layout import build_prompt
from steering.prompt.tiles import _with_row_ends, tiling_of
from tests import families
from tests.steering.conftest import LoadMLLM

TILED = ("internvl", "idefics3", "aya_vision", "lfm2_vl", "llava_next", "llava_onevision", "granite4_vision")


def picture(size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)


def features(mllm: MLLM, pixels: np.ndarray) -> torch.Tensor:
    """Return what the decoder receives for the tokens of an image, (tokens, d), in front of all layers."""
    part = {"type": "image", "image": Image.fromarray(pixels)}
    prompt = build_prompt(mllm, [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
    with torch.inference_mode():
        embedded = mllm.embed(prompt.inputs)
        later = embedded.extras.get("deepstack_features", {}).values()
        return torch.cat([embedded.embeds[0, prompt.layout.images[0].columns], *later], -1)


@pytest.fixture
def blind_to_others(monkeypatch: pytest.MonkeyPatch) -> Callable[[MLLM], None]:
    """Let the patches of a vision tower not attend to each other, so that a change stays where it is."""

    def silence(mllm: MLLM) -> None:
        tower = {name: module for name, module in mllm.model.named_modules() if "vision" in name}
        outputs = [
            m for name, m in tower.items() if name.endswith(("self_attn.out_proj", "attention.projection_layer"))
        ]
        assert outputs
        for module in outputs:
            monkeypatch.setattr(module.weight, "data", torch.zeros_like(module.weight))

    return silence


@pytest.mark.parametrize("size", [(112, 112), (200, 70), (50, 170), (168, 84)])
@pytest.mark.parametrize("family", TILED)
def test_a_change_shows_at_its_place(
    family: str, size: tuple[int, int], load_mllm: LoadMLLM, blind_to_others: Callable[[MLLM], None]
) -> None:
    mllm = load_mllm(family)
    blind_to_others(mllm)
    pixels = picture(size)
    part = {"type": "image", "image": Image.fromarray(pixels)}
    layout = build_prompt(mllm, [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]).layout
    tiling = tiling_of(mllm, part["image"], layout.images[0])
    assert tiling is not None
    rows, columns = tiling.grid
    used = sorted([*tiling.order.tolist(), *tiling.overview.tolist()])
    assert (
        len(set(used))
        == len(used)
        == layout.images[0].tokens - (rows if family.startswith(("llava", "granite")) else 0)
    )
    assert (rows > columns) == (size[1] > size[0]) or rows == columns
    before = features(mllm, pixels)
    for row, column in {(0, 0), (rows - 1, 0), (0, columns - 1), (rows // 2, columns - 1), (rows - 1, columns - 1)}:
        top, bottom = (round((row + part) * size[1] / rows) for part in (0.15, 0.85))
        left, right = (round((column + part) * size[0] / columns) for part in (0.15, 0.85))
        changed = pixels.copy()
        changed[top:bottom, left:right] = 255 - changed[top:bottom, left:right]
        moved = (features(mllm, changed) - before).norm(dim=-1)
        assert int(moved[tiling.order].argmax()) == row * columns + column
        if len(tiling.overview):
            small, (high, wide) = moved[tiling.overview], tiling.overview_grid
            under = [y * high // size[1] * wide + x * wide // size[0] for y in (top, bottom) for x in (left, right)]
            assert int(small.argmax()) in under


def test_a_small_picture_beside_a_tiled_one_keeps_its_grid(load_mllm: LoadMLLM) -> None:
    mllm, chat = load_mllm("lfm2_vl"), families.example_messages("lfm2_vl", 2)
    images = build_prompt(mllm, chat).layout.images
    tiled, small = (tiling_of(mllm, *one) for one in zip(families.images_of(chat), images, strict=True))
    assert tiled is not None
    assert small is not None
    assert (tiled.grid, small.grid, small.order.tolist()) == ((4, 4), (4, 2), [*range(8)])  # of 28 x 60 pixels


def test_one_grid_needs_no_tiling(load_mllm: LoadMLLM) -> None:
    mllm, chat = load_mllm("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    image = build_prompt(mllm, chat).layout.images[0]
    assert tiling_of(mllm, families.images_of(chat)[0], image) is None


@pytest.mark.parametrize(
    ("tokens", "tiles", "size", "grid"),
    [
        (24 * 24 + 48 * 49, 4, (800, 800), (48, 48)),
        (24 * 24 + 36 * 49, 4, (640, 480), (36, 48)),  # a margin above and below
        (24 * 24 + 24 * 49, 2, (1000, 500), (24, 48)),
        (24 * 24 + 48 * 37, 4, (480, 640), (48, 36)),
        (24 * 24 + 101, 4, (480, 640), None),
    ],
)
def test_rows_that_end_in_a_token(tokens: int, tiles: int, size: tuple[int, int], grid: tuple[int, int] | None) -> None:
    tiling = _with_row_ends(tokens, tiles, 24, size)
    assert (None if tiling is None else tiling.grid) == grid


@pytest.mark.parametrize("size", [(160, 10), (10, 160)])
def test_a_picture_too_narrow_for_its_tiles_is_refused(size: tuple[int, int], load_mllm: LoadMLLM) -> None:
    """LFM2-VL's processor makes the whole one larger than a tile, and then cannot stack them."""
    part = {"type": "image", "image": Image.new("RGB", size)}
    with pytest.raises(RequestError, match="too narrow"):
        build_prompt(load_mllm("lfm2_vl"), [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
