"""A prompt's first chunk makes its own masks, the same that transformers would make for it."""

from __future__ import annotations

import pytest
import torch
from transformers import Cohere2Config
from transformers.masking_utils import create_sliding_window_causal_mask

from steering.decoder.hooks import Hooks, Observer, Weights
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from tests import families
from tests.steering.conftest import LoadMLLM

PLACEHOLDER = torch.ones(1, 1, 1, 1, dtype=torch.bool)


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_pass_is_the_same_to_the_bit_if_the_model_builds_no_mask(family: str, rows: int, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    embeds = torch.randn(rows, 24, mllm.hidden_size, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24)[None].expand(rows, -1)
    further = {name: mllm.token_inputs(positions)[name] for name in mllm.token_inputs.further}

    @torch.inference_mode()
    def states(mask: torch.Tensor | None) -> torch.Tensor:
        step = Prefill(KVPool(2, 32), slice(0, rows))
        out: torch.Tensor = mllm.decoder(
            inputs_embeds=embeds, position_ids=positions, attention_mask=mask, use_cache=False, step=step, **further
        ).last_hidden_state
        return out

    assert torch.equal(states(PLACEHOLDER), states(None))


class Looks(Observer):
    """Keeps the weights of two queries of each row."""

    def prefill(self, layer: int, weights: Weights, columns: int) -> None:
        self.weights = weights(torch.tensor([[3, 11]] * 2))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5, 12, 13])
def test_weights_are_the_same_to_the_bit(window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 8, generator=generator) for heads in (4, 2, 2))
    built = None
    if window is not None:
        config = Cohere2Config(sliding_window=window, attn_implementation="sdpa")
        embeds = torch.zeros(2, 12, 8)
        built = create_sliding_window_causal_mask(config=config, inputs_embeds=embeds, attention_mask=None, cache=None)
        assert (built is None) == (window == 13)

    def attended(mask: torch.Tensor | None) -> list[torch.Tensor]:
        looks = Looks()
        step = Prefill(KVPool(2, 32), slice(0, 2), hooks=Hooks.of([looks]))
        return [step.attend(Heads(0, 0.3, window, softcap), query, key, value, mask), looks.weights]

    for ours, expected in zip(attended(PLACEHOLDER), attended(built), strict=True):
        assert torch.equal(ours, expected)
