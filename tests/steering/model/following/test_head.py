"""The head is the plain wrapper's own, whatever scales and caps a config names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaForConditionalGeneration

import steering
from tests import families
from tests.steering.conftest import LoadMLLM


@pytest.mark.parametrize("family", ["aya_vision", "granite_vision", "paligemma2", "llava"])
def test_logits_are_those_of_the_plain_forward(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    ids = torch.arange(5, 12)[None]
    with torch.inference_mode():
        out = mllm.model(input_ids=ids, use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(mllm.head(out.hidden_states[-1]), out.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["aya_vision", "granite_vision"])
def test_published_scales_are_served(family: str, load_mllm: LoadMLLM) -> None:
    config = load_mllm(family).text_config
    assert {"aya_vision": "logit_scale", "granite_vision": "logits_scaling"}[family] in vars(config)
    steering.Engine(load_mllm(family), slots=2, max_length=300)


def test_a_wrapper_that_caps_and_scales_is_followed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlavaForConditionalGeneration.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.logits = torch.tanh(output.logits.float() / 8.0) * 3.0
        return output

    monkeypatch.setattr(LlavaForConditionalGeneration, "forward", scaled)
    mllm = steering.load(families.checkpoint("llava", root), device="cpu", dtype="bfloat16")
    hidden = torch.randn(2, 3, mllm.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        expected = torch.tanh(mllm.model.lm_head(hidden).float() / 8.0) * 3.0
        torch.testing.assert_close(mllm.head(hidden), expected)
