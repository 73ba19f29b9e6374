"""The attention ratio, worked by hand."""

from __future__ import annotations

import pytest
import torch

from steering.prompt.spans import CONTEXT, FIRST_IMAGE, SYSTEM
from steering.readouts.modality import modality, share
from steering.recorders.spans import AFTER, BEFORE, source_shares, span_sources

SOURCES = span_sources(FIRST_IMAGE + 4)


def test_the_ratio_compares_the_mean_image_token_with_the_mean_context_token() -> None:
    # Layer 0: image 8 / 16 = 0.5 a token, context 2 / 4 = 0.5. Layer 1: 0.25 and 0.75.
    readout = modality(torch.tensor([8.0, 4.0]), torch.tensor([2.0, 3.0]), 16, 4)
    assert readout["by_layer"] == pytest.approx([0.5, 0.25])
    assert readout["attention_ratio"] == pytest.approx(0.75 / 2.0)


@pytest.mark.parametrize(("image", "context", "reason"), [(0, 4, "no_image"), (16, 0, "no_context"), (0, 0, "neither")])
def test_without_one_of_the_two_there_is_a_reason_in_place_of_the_ratio(image: int, context: int, reason: str) -> None:
    readout = modality(torch.tensor([8.0 * bool(image)]), torch.tensor([2.0 * bool(context)]), image, context)
    assert readout == {"attention_ratio": None, "by_layer": None, "reason": reason}


def test_a_layer_whose_window_holds_neither_has_none() -> None:
    readout = modality(torch.tensor([0.0, 4.0]), torch.tensor([0.0, 3.0]), 16, 4)
    assert readout["by_layer"] == [None, pytest.approx(0.25)]
    assert readout["attention_ratio"] == pytest.approx(0.25)
    assert readout["reason"] is None
    nothing = {"attention_ratio": None, "by_layer": [None, None], "reason": "out_of_window"}
    assert modality(torch.zeros(2), torch.zeros(2), 16, 4) == nothing


def test_the_share_is_the_mean_of_what_each_row_gives_to_the_tokens() -> None:
    # Four rows: layer 0 gives a tenth each, layer 1 three tenths.
    assert share(torch.tensor([0.4, 1.2]), 4, 16) == pytest.approx(0.2)
    assert share(torch.zeros(2), 4, 0) is None
    assert share(torch.zeros(2), 4, 16) == 0.0


def test_shares_of_vision_system_and_user_text() -> None:
    sums = torch.zeros(1, 2, FIRST_IMAGE + 4)  # one row, two layers, two images, the prompt's two halves
    sums[0, 0, [SYSTEM, CONTEXT, FIRST_IMAGE, FIRST_IMAGE + 1, BEFORE, AFTER]] = torch.tensor(
        [0.1, 0.05, 0.3, 0.2, 0.1, 0.2]
    )
    sums[0, 1, [SYSTEM, BEFORE, AFTER]] = torch.tensor([0.3, 0.3, 0.1])
    # Layer 0: 0.5, 0.1, 0.2 of 0.8; layer 1: 0, 0.3, 0.1 of 0.4.
    expected = torch.tensor([[[0.625, 0.125, 0.25], [0.0, 0.75, 0.25]]])
    torch.testing.assert_close(source_shares(sums, SOURCES), expected)


def test_layers_that_see_none_of_the_three_have_no_shares() -> None:
    sums = torch.zeros(2, 2, FIRST_IMAGE + 4)
    sums[0, 1, BEFORE] = 0.2
    shares = source_shares(sums, SOURCES)
    torch.testing.assert_close(shares[0, 1], torch.tensor([0.0, 1.0, 0.0]))
    assert shares[0, 0].isnan().all()
    assert shares[1].isnan().all()
