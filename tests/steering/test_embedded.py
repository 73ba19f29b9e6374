"""Prompts cut into chunks and joined into batches hold what the whole prompts hold, DeepStack features included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from steering import MLLM
from steering.embedded import Embedded, Overlay
from steering.layout import build_prompt
from tests import families

LoadMLLM = Callable[[str], MLLM]
DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")
BIDIRECTIONAL = ("gemma3", "paligemma", "paligemma2")  # image tokens see each other


def overlay(mask: list[bool], offset: float = 0.0) -> Overlay:
    """Two layers of features of width 1, numbered by token."""
    marked = torch.tensor([mask])
    numbers = marked[0].nonzero().float() + offset
    return Overlay("where", marked, {"what": [numbers, numbers + 100]})


def laid_out(part: Overlay) -> torch.Tensor:
    """Features put on their tokens as the decoder does it: (layers, rows, n), NaN where there are none."""
    out = torch.full((2, *part.mask.shape), torch.nan)
    for layer, features in zip(out, part.features["what"], strict=True):
        layer[part.mask] = features[:, 0]
    return out


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(("start", "end"), [(0, 6), (0, 2), (2, 4), (3, 6), (5, 6), (0, 1)])
def test_a_cut_keeps_each_tokens_features(start: int, end: int) -> None:
    whole = overlay([False, True, True, False, True, False])
    same(laid_out(whole.cut(start, end)), laid_out(whole)[:, :, start:end])


def test_a_join_keeps_each_prompts_features() -> None:
    first, second = overlay([False, True, True]), overlay([True, False, False, True], offset=10)
    joined = Overlay.join([first, None, second], width=5)
    assert joined is not None
    table = laid_out(joined)
    same(table[:, 0, :3], laid_out(first)[:, 0])
    same(table[:, 2, :4], laid_out(second)[:, 0])
    assert not joined.mask[1].any()
    assert not joined.mask[0, 3:].any()
    assert not joined.mask[2, 4:].any()
    assert Overlay.join([None, None], width=5) is None


def test_only_arguments_that_are_understood_make_an_overlay() -> None:
    mask, features = torch.tensor([[True, False, True]]), [torch.zeros(2, 4)]
    found = Overlay.find({"where": mask, "what": features}, 3)
    assert found is not None
    assert (found.name, list(found.features)) == ("where", ["what"])
    others: list[dict[str, Any]] = [
        {},
        {"what": features},
        {"where": mask, "what": features, "more": 1},
        {"where": mask, "also": mask, "what": features},
        {"where": mask[:, :2], "what": features},
        {"where": mask, "what": [torch.zeros(3, 4)]},  # three features for two tokens
        {"where": mask, "what": torch.zeros(2, 4)},
    ]
    for extras in others:
        assert Overlay.find(extras, 3) is None


@pytest.mark.parametrize("family", families.FAMILIES)
def test_what_may_be_cut_and_joined(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    with torch.inference_mode():
        embedded = mllm.embed(build_prompt(mllm, families.example_messages(family, 2)).inputs)
    assert embedded.divisible == (family not in BIDIRECTIONAL)
    assert (embedded.overlay is not None) == (family in DEEPSTACK)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava"])
def test_chunks_put_together_are_the_prompt(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    with torch.inference_mode():
        whole = mllm.embed(build_prompt(mllm, families.example_messages(family, 2)).inputs)
    parts = [whole.cut(start, min(start + 7, whole.length)) for start in range(0, whole.length, 7)]
    assert torch.equal(torch.cat([part.embeds for part in parts], dim=1), whole.embeds)
    assert torch.equal(torch.cat([part.positions for part in parts], dim=-1), whole.positions)
    assert sum(part.length for part in parts) == whole.length
    if whole.overlay is not None:
        overlays = [part.overlay for part in parts if part.overlay is not None]
        assert torch.equal(torch.cat([part.mask for part in overlays], dim=1), whole.overlay.mask)
        for name, layers in whole.overlay.features.items():
            for number, layer in enumerate(layers):
                assert torch.equal(torch.cat([part.features[name][number] for part in overlays]), layer)


def test_joined_prompts_are_padded_on_the_right_and_their_positions_go_on() -> None:
    short = Embedded(torch.ones(1, 2, 4), torch.tensor([[[0, 5]], [[0, 3]]]))
    long = Embedded(torch.full((1, 4, 4), 2.0), torch.tensor([[[0, 1, 2, 3]], [[0, 1, 2, 3]]]))
    joined = Embedded.join([short, long])
    assert joined.embeds[:, :, 0].tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]
    assert joined.positions.tolist() == [[[0, 5, 6, 7], [0, 1, 2, 3]], [[0, 3, 4, 5], [0, 1, 2, 3]]]


def test_the_next_position_is_one_more_than_the_largest() -> None:
    # Seven tokens, of which an image of four counts as two positions.
    embedded = Embedded(torch.zeros(1, 7, 4), torch.tensor([[[0, 1, 1, 2, 2, 3, 4]]]))
    assert embedded.length + embedded.rope_delta == 5
