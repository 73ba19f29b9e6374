"""The focus metrics, worked by hand."""

from __future__ import annotations

import pytest
import torch

from steering.readouts.focus import focus, image_attention_factor, lnd, m_lnd, mc_lnd


def test_sigma_is_a_mean_over_rows_and_over_the_images_own_tokens() -> None:
    # Two layers; 5 rows in all; image 1 has 4 tokens, image 2 has 8.
    sums = torch.tensor([[2.0, 2.0], [0.0, 4.0]])
    sigma = image_attention_factor(sums, 5, torch.tensor([4, 8]))
    torch.testing.assert_close(sigma, torch.tensor([[0.1, 0.05], [0.0, 0.1]]))


# Layers x images; in words what each metric sees.
CASES = [
    # One layer is very sure of image 1, two are mildly for image 2, and the means are 4/3 to 3/3.
    ([[4.0, 0.0], [0.0, 1.5], [0.0, 1.5]], {"lnd": 0, "m_lnd": 0, "mc_lnd": 1}),
    # The largest single factor is image 3's, the largest mean image 2's, most layers are image 1's.
    (
        [[0.3, 0.29, 0.0], [0.3, 0.29, 0.0], [0.3, 0.29, 0.0], [0.0, 0.45, 0.46], [0.0, 0.3, 0.46]],
        {"lnd": 2, "m_lnd": 1, "mc_lnd": 0},
    ),
    # Two votes each: the tie goes to the larger sum over the layers in which an image was focused, 0.9 to 0.8;
    # the sum over all layers, 1.0 to 1.5, would say otherwise.
    ([[0.5, 0.4], [0.4, 0.3], [0.05, 0.4], [0.05, 0.4]], {"lnd": 0, "m_lnd": 1, "mc_lnd": 0}),
    # The votes outweigh any sum.
    ([[0.1, 0.0], [0.1, 0.0], [0.0, 9.0]], {"lnd": 1, "m_lnd": 1, "mc_lnd": 0}),
    # An image that was never focused does not win a tie, however large its sum.
    ([[0.5, 0.4, 0.0], [0.0, 0.4, 0.5]], {"lnd": 0, "m_lnd": 1, "mc_lnd": 0}),
    # One image.
    ([[0.1], [0.2]], {"lnd": 0, "m_lnd": 0, "mc_lnd": 0}),
]


@pytest.mark.parametrize(("sigma", "expected"), CASES)
def test_the_three_metrics(sigma: list[list[float]], expected: dict[str, int]) -> None:
    table = torch.tensor(sigma)
    assert {"lnd": lnd(table), "m_lnd": m_lnd(table), "mc_lnd": mc_lnd(table)} == expected


def test_layers_whose_window_holds_no_image_have_no_vote() -> None:
    sigma = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.1, 0.2]])
    assert mc_lnd(sigma) == 1
    assert focus(sigma, 3, None)["layer_focused"] == [None, None, 2]


def test_where_no_image_was_seen_none_is_focused() -> None:
    readout = focus(torch.zeros(2, 3), 2, target_image=1)
    assert readout["layer_focused"] == [None, None]
    assert readout["image"] is None
    assert readout["correct"] is None
    assert [readout[name] for name in ("lnd", "m_lnd", "mc_lnd")] == [{"n": 2, "image": None}] * 3


def test_the_readout_counts_images_from_one_and_looks_at_the_last_layers() -> None:
    sigma = torch.tensor([[9.0, 0.0, 0.0], [0.0, 0.2, 0.1], [0.0, 0.2, 0.5]])
    readout = focus(sigma, 2, target_image=3)
    assert readout["sigma"] == sigma.tolist()
    assert readout["layer_focused"] == [1, 2, 3]
    assert readout["lnd"] == {"n": 2, "image": 3}
    assert readout["m_lnd"] == {"n": 2, "image": 3}
    assert readout["mc_lnd"] == {"n": 2, "image": 3}  # one vote each, 0.2 to 0.5
    assert (readout["image"], readout["target_image"], readout["correct"]) == (3, 3, True)
    assert focus(sigma, 2, target_image=1)["correct"] is False
    assert focus(sigma, 2, target_image=None)["correct"] is None
    assert focus(sigma, 3, target_image=1)["image"] == 1
