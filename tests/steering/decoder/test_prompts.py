"""A prompt's first chunk makes its own masks, the same that transformers would make for it."""

from __future__ import annotations

import pytest
import torch
from transformers import Cohere2Config
from transformers.masking_utils import create_sliding_window_causal_mask

from steering.decoder.hooks import Hooks, Observer, Weights
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill, Ragged
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


def test_padding_beyond_a_window_spoils_no_sums_of_weights() -> None:
    """Of two prompts in one pass, the first goes on at column 20 with 2 tokens, and is padded to the 12 of the other."""
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 1, 12, 4, generator=drawn) for _ in range(3))
    pool = KVPool(2, 40)
    keys, _ = pool.layer(0, key, value)
    keys[:, :, :20] = torch.randn(2, 1, 20, 4, generator=drawn)
    seen: list[torch.Tensor] = []

    class Summing(Observer):
        def prefill(self, layer: int, weights: Weights, columns: int) -> None:
            groups = torch.zeros(2, 1, 12)
            groups[0, 0, :2] = 1.0  # all tokens of the first prompt
            seen.append(weights.grouped(torch.arange(12).expand(2, -1), groups))

    step = Prefill(pool, slice(0, 2), 20, Hooks.of([Summing()]), Ragged([20, 0], [2, 12]))
    step.attend(Heads(0, 0.5, 4, None), query, key, value, None)
    expected = torch.zeros(22)
    for token, column in enumerate((20, 21)):
        near = slice(column - 3, column + 1)
        expected[near] += (keys[0, 0, near] @ query[0, 0, token] * 0.5).softmax(0)
    torch.testing.assert_close(seen[0][0, 0], expected)
