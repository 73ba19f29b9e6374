"""Results that follow from the sizes of pictures are made once, and equal the plain model's each time."""

from __future__ import annotations

import pytest
import torch

from steering.model.images import is_text_input
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain


@pytest.mark.parametrize("family", families.FAMILIES)
def test_features_equal_the_plain_models_after_any_other_pictures(
    family: str, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    mllm, plain = load_mllm(family), load_plain(family)
    for seed, count in ((0, 1), (1, 3), (2, 1), (1, 3)):
        inputs = plain.inputs(families.example_messages(family, count, seed=seed))
        pictures = {name: value for name, value in inputs.items() if not is_text_input(name)}
        with torch.no_grad():
            expected = plain.model.model.get_image_features(**pictures, return_dict=True).pooler_output
        with torch.inference_mode():
            features = mllm.image_features(pictures).pooler_output
        for actual, wanted_features in zip(features, expected, strict=True):
            torch.testing.assert_close(actual, wanted_features, rtol=1e-4, atol=1e-4)
    pixels = pictures["pixel_values"].clone().requires_grad_()  # what is kept was first made in another mode
    sum(
        features_of_picture.sum()
        for features_of_picture in mllm.image_features({**pictures, "pixel_values": pixels}).pooler_output
    ).backward()
    assert pixels.grad is not None


def test_pictures_of_one_size_are_separated_for_an_encoder_of_whole_pictures(load_mllm: LoadMLLM) -> None:
    def given(family: str, *grids: tuple[int, int, int]) -> list[torch.Tensor] | None:
        mllm, sizes = load_mllm(family), torch.tensor(grids)
        patches = int(sizes.prod(-1).sum())
        pixels = torch.arange(patches * 1176.0).view(patches, 1176)
        return mllm.alike({"image_grid_thw": sizes, "pixel_values": pixels})

    fed = given("qwen2_vl", (1, 4, 6), (1, 4, 6))
    assert fed is not None
    pixels, positions = fed
    assert (pixels.shape, positions.shape) == ((2, 6, 4, 1176), (2, 6, 4, 2))
    assert torch.equal(pixels.flatten(), torch.arange(2 * 24 * 1176.0))
    assert positions[0, :2].tolist() == [[[0, 0], [0, 1], [1, 0], [1, 1]], [[0, 2], [0, 3], [1, 2], [1, 3]]]
    assert torch.equal(positions[0], positions[1])
    assert given("qwen2_vl", (1, 4, 6), (1, 6, 4)) is None
    assert given("qwen2_vl", (2, 4, 6)) is None  # frames, each of which is looked at by itself
    assert given("qwen2_5_vl", (1, 4, 6)) is None  # windows
    assert given("llava", (1, 4, 6)) is None
