"""The places of features are counted on the host, and a wrapper's own count is left out only meanwhile."""

from __future__ import annotations

import pytest
import torch

from steering.model.images import Features
from steering.vision.placeholders import added, counted, prepare
from tests import families
from tests.steering.conftest import LoadMLLM


def features_of(*rows: int) -> Features:
    return Features([torch.zeros(number, 4) for number in rows])


@pytest.mark.parametrize("family", [family for family in families.FAMILIES if family != "idefics3"])
def test_a_wrapper_does_not_count_within_the_block(family: str, load_mllm: LoadMLLM) -> None:
    wrapper = load_mllm(family).model.model
    ids = torch.tensor([[1, *[wrapper.config.image_token_id] * 5, 2]])
    embeds, fitting = torch.zeros(1, 7, 4), torch.zeros(5, 4)
    own = wrapper.get_placeholder_mask
    expected = own(ids, inputs_embeds=embeds, image_features=fitting)
    with counted(wrapper, 5, features_of(2, 3)):
        again = wrapper.get_placeholder_mask(ids, inputs_embeds=embeds, image_features=fitting)
    for first, second in zip(
        *(made if isinstance(made, tuple) else (made,) for made in (expected, again)), strict=True
    ):
        assert torch.equal(first, second)
    assert "get_placeholder_mask" not in vars(wrapper)
    with pytest.raises(ValueError, match=r"features|tokens"):
        wrapper.get_placeholder_mask(ids, inputs_embeds=embeds, image_features=fitting[:3])


def test_a_wrong_number_of_features_is_refused(load_mllm: LoadMLLM) -> None:
    wrapper = load_mllm("qwen2_5_vl").model.model
    for features in (features_of(5), features_of(3, 4), Features(torch.zeros(2, 2, 4))):
        with pytest.raises(ValueError, match="do not match, tokens: 6"), counted(wrapper, 6, features):
            pass
    with counted(wrapper, 6, Features(torch.zeros(2, 3, 4))):
        assert "get_placeholder_mask" in vars(wrapper)
    assert "get_placeholder_mask" not in vars(wrapper)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_added_as_by_the_decoder(dtype: torch.dtype, load_mllm: LoadMLLM) -> None:
    decoder = load_mllm("qwen3_vl").decoder
    torch.manual_seed(0)
    states, mask = torch.randn(2, 7, 8, dtype=dtype), torch.rand(2, 7) > 0.5
    features = torch.randn(int(mask.sum()), 8)
    assert torch.equal(added(states, mask, features), decoder._deepstack_process(states, mask, features))
    prepare(decoder, torch.device("cpu"))
    assert "_deepstack_process" not in vars(decoder)
