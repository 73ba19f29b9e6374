"""An image's tokens are those that its pixels change, and its grid lies on it as people see it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from steering import Request, Sampling
from steering.prompt.layout import build_prompt
from steering.prompt.spans import FIRST_IMAGE
from tests import families
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM, LoadPlain
from tests.steering.plain import Messages, Plain
from tests.steering.prompt.reading import EVERY, user


class Received(Exception):
    """Ends a pass where the decoder would begin."""


def decoder_embeds(plain: Plain, messages: Messages) -> torch.Tensor:
    """Return the embeddings that the plain model's decoder receives: (n, d)."""

    def received(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        raise Received(kwargs["inputs_embeds"])

    handle = plain.model.get_decoder().register_forward_pre_hook(received, with_kwargs=True)
    with torch.inference_mode(), pytest.raises(Received) as found:
        plain.model(**plain.inputs(messages))
    handle.remove()
    embeds: torch.Tensor = found.value.args[0]
    return embeds[0]


@pytest.mark.parametrize(
    ("family", "separated"), [*((family, False) for family in EVERY), ("qwen2_vl", True), ("llava_next", True)]
)
def test_each_images_tokens_are_those_that_its_pixels_change(
    family: str, separated: bool, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    def chat(changed: int | None) -> Messages:
        pictures = [image(i, seed=int(i == changed)) for i in range(3)]
        between = [text("first."), text("second.")] if separated else []
        parts: Sequence[Any] = [part for pair in zip(pictures, between, strict=False) for part in pair] or pictures[:2]
        return user(*parts, pictures[2], text("Which?"))

    prompt = build_prompt(load_mllm(family), chat(None))
    columns = [picture.columns for picture in prompt.layout.images]
    placeholders = (prompt.ids == load_mllm(family).image_token_id).nonzero()[:, 0]
    assert torch.equal(torch.cat(columns), placeholders)
    embeds = decoder_embeds(load_plain(family), chat(None))
    for changed in range(3):
        difference = (decoder_embeds(load_plain(family), chat(changed)) - embeds).abs().amax(-1) > 1e-4
        moved = set(difference.nonzero()[:, 0].tolist())
        assert moved <= set(columns[changed].tolist())
        assert len(moved) >= 0.7 * len(
            columns[changed]
        )  # LLaVA-NeXT ends its rows with a token that is not of the image
        assert torch.equal(prompt.layout.columns(FIRST_IMAGE + changed), columns[changed])


# Sizes are (56, 40), (28, 60) and (44, 44) pixels; grids are rows and columns.
GRIDS: dict[str, list[tuple[int, int] | None]] = {
    "qwen2_vl": [(3, 4), (4, 2), (3, 3)],  # sides in steps of 14 pixels
    "qwen2_5_vl": [(3, 4), (4, 2), (3, 3)],
    "qwen3_vl": [(3, 4), (4, 2), (3, 3)],
    "mistral3": [(3, 4), (4, 2), (4, 4)],  # longest side at most 56, patches of 7 rounded up, two by two merged
    "llava": [(4, 4)] * 3,  # 28 pixels in patches of 7
    "paligemma": [(4, 4)] * 3,
    "gemma3": [(2, 2)] * 3,
    "llava_next": [None] * 3,  # tiles
    "internvl": [None, None],
    "idefics3": [None] * 3,
    "aya_vision": [None, None],
    "lfm2_vl": [None, None],
}


@pytest.mark.parametrize("family", GRIDS)
def test_grids_by_hand(family: str, load_mllm: LoadMLLM) -> None:
    expected = GRIDS[family]
    prompt = build_prompt(load_mllm(family), families.example_messages(family, len(expected)))
    assert [picture.grid for picture in prompt.layout.images] == expected
    for picture in prompt.layout.images:
        assert picture.grid is None or picture.grid[0] * picture.grid[1] == picture.tokens == len(picture.columns)


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen3_vl", "glm4v", "mistral3", "llava", "paligemma", "gemma3", "lfm2_vl"]
)
def test_the_grid_lies_on_the_image_as_people_see_it(family: str, load_mllm: LoadMLLM, root: Path) -> None:
    """A changed corner changes the token of that corner only, if patches do not see each other."""
    size, side = {"llava": ((28, 28), 7), "paligemma": ((28, 28), 7), "gemma3": ((28, 28), 14)}.get(
        family, ((56, 28), 14)
    )
    plain = Plain(families.checkpoint(family, root))
    blind = re.compile(r"(vision|visual).*(attn|attention)\.(out_proj|o_proj|proj)\.")
    for name, weight in plain.model.named_parameters():
        if blind.search(name):
            weight.data.zero_()

    def embeds(*corners: tuple[int, int]) -> torch.Tensor:
        picture = Image.new("RGB", size, (120, 120, 120))
        for left, top in corners:
            picture.paste((255, 20, 20), (left, top, left + side, top + side))
        return decoder_embeds(plain, user({"type": "image", "image": picture}, text("?")))

    picture = {"type": "image", "image": Image.new("RGB", size, (120, 120, 120))}
    span = build_prompt(load_mllm(family), user(picture, text("?"))).layout.images[0]
    assert span.grid is not None
    rows, width = span.grid
    corners = {(0, 0): 0, (size[0] - side, 0): width - 1, (0, size[1] - side): (rows - 1) * width}
    for corner, token in corners.items():
        change = (embeds(corner) - embeds()).norm(dim=-1)[span.columns]
        assert (change > 1e-3).nonzero()[:, 0].tolist() == [token]


def test_a_picture_is_resized_first_where_the_checkpoint_asks(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = load_mllm("qwen2_vl")
    monkeypatch.setattr(mllm, "image_size", (42, 28))
    prompt = build_prompt(mllm, families.example_messages("qwen2_vl", 2))
    assert [picture.grid for picture in prompt.layout.images] == [(2, 3), (2, 3)]


def test_a_black_picture_is_not_taken_for_padding(
    load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idefics 3 drops tiles that are zero everywhere, which the black ones of this preprocessing are."""
    messages = families.example_messages("idefics3", 2)
    messages[0]["content"][0]["image"] = Image.new("RGB", (60, 40))
    for loaded in (load_mllm("idefics3"), load_plain("idefics3")):
        monkeypatch.setattr(loaded.processor.image_processor, "image_mean", [0.0] * 3)
    almost = load_plain("idefics3").inputs(messages)
    blank = ~almost["pixel_values"].flatten(2).any(-1)
    assert bool(blank.any())
    almost["pixel_values"][blank] += 1e-7
    choice = (
        make_engine("idefics3").generate([Request(messages, Sampling(max_tokens=4, ignore_eos=True))])[0].choices[0]
    )
    assert list(choice.token_ids) == load_plain("idefics3").answer(messages, 4, inputs=almost).tokens
