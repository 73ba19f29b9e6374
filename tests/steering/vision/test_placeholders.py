"""The places of features are counted on the host, and a wrapper's own count is left out only meanwhile."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from steering.vision.placeholders import added, counted, prepare
from tests import families
from tests.steering.conftest import LoadMLLM

METHODS = ("get_placeholder_mask", "inputs_merger")


def prompt_of(wrapper: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a prompt with five image tokens on the CPU, and the same as another tensor."""
    ids = torch.tensor([[1, *[wrapper.config.image_token_id] * 5, 2]])
    return ids, ids.clone()


def counts(wrapper: Any) -> bool:
    """Return True where the wrapper compares the number of places with that of features as it looks for the places."""
    return "image_features" in inspect.signature(type(wrapper).get_placeholder_mask).parameters


def found(wrapper: Any, ids: torch.Tensor, features: torch.Tensor) -> list[torch.Tensor]:
    """Return what the wrapper makes of features (k, 4): their places, or embeddings that hold them."""
    embeds = torch.arange(28.0).view(1, 7, 4)
    if hasattr(wrapper, "inputs_merger"):
        return [wrapper.inputs_merger(input_ids=ids, inputs_embeds=embeds, image_hidden_states=features)]
    more = {"image_features": features} if counts(wrapper) else {}
    places = wrapper.get_placeholder_mask(ids, inputs_embeds=embeds, **more)
    return list(places) if isinstance(places, tuple) else [places]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_wrapper_finds_the_same_places_within_the_block(family: str, load_mllm: LoadMLLM) -> None:
    wrapper, features = load_mllm(family).model.model, torch.randn(5, 4)[:, None]
    ids, sent = prompt_of(wrapper)
    expected = found(wrapper, sent, features)
    with counted(wrapper, ids, sent):
        assert vars(wrapper).keys() & METHODS
        for actual, wanted in zip(found(wrapper, sent, features), expected, strict=True):
            assert torch.equal(actual, wanted)
        other = torch.where(ids == 1, 2, ids)
        for actual, wanted in zip(found(wrapper, other, features), expected, strict=True):
            assert torch.equal(actual, wanted), "other tokens than the prompt's are read as they are"
    assert not vars(wrapper).keys() & METHODS


@pytest.mark.parametrize(
    "family", [family for family in families.FAMILIES if family != "gemma4"]
)  # compares them later
def test_a_wrong_number_of_features_is_refused_in_the_wrappers_words(family: str, load_mllm: LoadMLLM) -> None:
    wrapper = load_mllm(family).model.model
    ids, sent = prompt_of(wrapper)
    for number in (0, 4, 6):
        features = torch.zeros(number, 1, 4)
        with pytest.raises(ValueError, match="do not match, tokens: 5, features") as own:
            found(wrapper, sent, features)
        with pytest.raises(ValueError, match="do not match") as ours, counted(wrapper, ids, sent):
            found(wrapper, sent, features)
        assert str(ours.value) == str(own.value)
        assert not vars(wrapper).keys() & METHODS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_added_as_by_the_decoder(dtype: torch.dtype, load_mllm: LoadMLLM) -> None:
    decoder = load_mllm("qwen3_vl").decoder
    torch.manual_seed(0)
    states, mask = torch.randn(2, 7, 8, dtype=dtype), torch.rand(2, 7) > 0.5
    features = torch.randn(int(mask.sum()), 8)
    assert torch.equal(added(states, mask, features), decoder._deepstack_process(states, mask, features))
    prepare(decoder, torch.device("cpu"))
    assert "_deepstack_process" not in vars(decoder)
