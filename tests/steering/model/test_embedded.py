"""Cutting prompts into chunks and joining them into a batch, also where features are laid on some of their tokens."""

from __future__ import annotations

import torch

from steering.model.embedded import Embedded, Overlay


def prompt(tokens: int, images: list[int], first_feature: float = 0.0) -> Embedded:
    """Return a prompt of width 2 whose tokens at `images` get the features first_feature, first_feature + 1, ..."""
    mask = torch.zeros(1, tokens, dtype=torch.bool)
    mask[0, images] = True
    features = first_feature + torch.arange(len(images), dtype=torch.float32)[:, None].expand(-1, 2)
    overlay = Overlay.find({"where": mask, "what": [features, 10 * features]}, tokens, mask) if images else None
    return Embedded(torch.ones(1, tokens, 2), torch.arange(tokens)[None], overlay=overlay)


def laid(overlay: Overlay) -> torch.Tensor:
    """(rows, n) the first layer's feature at each token, nan where there is none."""
    out = torch.full(overlay.mask.shape, torch.nan)
    out[overlay.mask] = overlay.features["what"][0][:, 0]
    return out


def test_an_overlay_is_found_only_where_every_argument_is_understood() -> None:
    mask = torch.tensor([[True, False, True]])
    features = [torch.zeros(2, 4)]
    assert Overlay.find({"where": mask, "what": features}, 3, mask) is not None
    assert Overlay.find({"where": mask, "what": [torch.zeros(3, 4)]}, 3, mask) is None  # not one row a marked token
    assert Overlay.find({"where": mask, "what": features, "else": 1}, 3, mask) is None
    assert Overlay.find({"where": mask.int(), "what": features}, 3, mask) is None
    assert Overlay.find({}, 3, mask) is None


def test_chunks_put_together_are_the_prompt() -> None:
    full = prompt(7, [1, 2, 5])
    pieces = [full.cut(0, 2), full.cut(2, 5), full.cut(5, 7)]
    assert torch.equal(torch.cat([piece.positions for piece in pieces], dim=-1), full.positions)
    overlays = [piece.overlay for piece in pieces if piece.overlay is not None]
    assert full.overlay is not None
    together = torch.cat([laid(overlay) for overlay in overlays], dim=-1)
    torch.testing.assert_close(together, laid(full.overlay), equal_nan=True)


def test_a_batch_keeps_every_feature_with_its_token() -> None:
    batch = Embedded.join([prompt(3, [1]), prompt(2, []), prompt(4, [0, 3], first_feature=5.0)])
    assert batch.overlay is not None
    expected = torch.full((3, 4), torch.nan)
    expected[0, 1], expected[2, 0], expected[2, 3] = 0.0, 5.0, 6.0
    torch.testing.assert_close(laid(batch.overlay), expected, equal_nan=True)
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 3  # padding counts on
    assert batch.embeds[1].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def test_a_batch_of_texts_has_no_overlay() -> None:
    assert Embedded.join([prompt(3, []), prompt(2, [])]).overlay is None


def test_a_text_among_prompts_with_multi_axis_positions_counts_on_every_axis() -> None:
    axes = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 3], [0, 1, 1, 3]])[:, None]
    batch = Embedded.join([prompt(2, []), Embedded(torch.ones(1, 4, 2), axes), prompt(3, [])])
    assert batch.positions.shape == (3, 3, 4)
    assert torch.equal(batch.positions[:, 1], axes[:, 0])
    assert batch.positions[:, [0, 2]].tolist() == [[[0, 1, 2, 3]] * 2] * 3


def test_further_inputs_of_tokens_are_cut_and_joined_with_them() -> None:
    def of(tokens: int) -> Embedded:
        further = torch.arange(tokens * 6.0).view(1, tokens, 3, 2) + 1
        return Embedded(torch.ones(1, tokens, 2), torch.arange(tokens)[None], by_token={"further": further})

    full = of(5)
    assert full.divisible
    assert not full.plain
    pieces = [full.cut(0, 2).arguments["further"], full.cut(2, 5).arguments["further"]]
    assert torch.equal(torch.cat(pieces, 1), full.by_token["further"])
    batch = Embedded.join([of(2), full]).arguments["further"]
    assert torch.equal(batch[1], full.by_token["further"][0])
    assert torch.equal(batch[0, :2], of(2).by_token["further"][0])
    assert not batch[0, 2:].any()
