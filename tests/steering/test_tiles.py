"""Tiles are put together where a change of the picture shows in the features."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from steering import MLLM
from steering.layout import build_prompt
from steering.tiles import tiling_of
from tests import families

LoadMLLM = Callable[[str], MLLM]
TILED = ("internvl", "idefics3", "aya_vision")


def picture(size: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)


def features(mllm: MLLM, pixels: np.ndarray) -> torch.Tensor:
    """What the decoder receives for the tokens of an image, (tokens, d)."""
    part = {"type": "image", "image": Image.fromarray(pixels)}
    prompt = build_prompt(mllm, [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}])
    with torch.inference_mode():
        return mllm.embed(prompt.inputs).embeds[0, prompt.layout.images[0].columns]


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
    assert sorted([*tiling.order.tolist(), *tiling.overview.tolist()]) == list(range(layout.images[0].tokens))
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
            place = (row * high // rows) * wide + column * wide // columns
            assert int(small.argmax()) == place


def test_one_grid_needs_no_tiling_and_strange_tiles_have_none(load_mllm: LoadMLLM) -> None:
    for family in ("qwen2_vl", "llava_next"):
        mllm = load_mllm(family)
        chat = families.example_messages(family, 1)
        image = build_prompt(mllm, chat).layout.images[0]
        assert tiling_of(mllm, families.images_of(chat)[0], image) is None
