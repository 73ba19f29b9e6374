"""Updates to the residual stream are freed as soon as hooks have read them: for a long prompt they are large."""

from __future__ import annotations

import torch

from steering.decoder.hooks import Hooks, LayerHook
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from steering.decoder.updates import Updates
from tests.steering.conftest import LoadMLLM


class Watching(LayerHook):
    """Remembers the updates of every layer, and of how many of those before it something is kept."""

    def __init__(self) -> None:
        self.seen: list[Updates] = []
        self.held: list[int] = []

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        self.held.append(sum(holds(one) for one in self.seen))
        self.seen.append(updates)
        assert holds(updates)
        return hidden


def holds(updates: Updates) -> bool:
    return bool(updates.mha.numel() or updates.ffn.numel() or updates.gate is not None)


def test_only_one_layers_updates_are_kept(load_mllm: LoadMLLM) -> None:
    mllm, watching = load_mllm("qwen2_vl"), Watching()
    mllm.column()  # the pass that tells where updates are added
    embeds = torch.randn(1, 9, mllm.hidden_size, generator=torch.Generator().manual_seed(0))
    step = Prefill(KVPool(1, 9), slice(0, 1), hooks=Hooks.of([watching]))
    with torch.inference_mode():
        mllm.decoder(inputs_embeds=embeds, position_ids=torch.arange(9)[None], use_cache=False, step=step)
    assert watching.held == [0] * mllm.num_layers
    assert not any(map(holds, watching.seen))
