"""The two updates that each decoder layer adds to the residual stream, and the point behind it where hooks are called.

The layers are extended once, at load, and find their hooks in the step that travels with the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from steering.decoder.ranks import ALONE, Ranks


class Updates:
    """The two updates that a layer adds to the residual stream, (rows, n, d), and the pre-activations of its FFN's gates
    (rows, n, width), None where it has no such; kept while the layer runs.

    Where a family normalises behind a sub-block, the update is what leaves that norm. `width` is the number of gates, 0
    where there are none; `activation` the function behind them.
    """

    def __init__(self, layer: nn.Module, ranks: Ranks = ALONE):
        self._ranks = ranks
        self._nothing = self.mha = self.ffn = torch.empty(0)
        self._gate: torch.Tensor | None = None
        mlp = getattr(layer, "mlp", None)
        fused = getattr(mlp, "gate_up_proj", None)  # whose first half are the gates
        self._gates = 2 if isinstance(fused, nn.Linear) else 1
        gates = fused if isinstance(fused, nn.Linear) else getattr(mlp, "gate_proj", None)
        self._outputs = gates.out_features if isinstance(gates, nn.Linear) else 0
        self.width = self._outputs // self._gates
        self.activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None) or nn.functional.silu
        self._keep("_gate", gates)
        after_mha = getattr(layer, "post_self_attn_layernorm", None)
        if after_mha is None and hasattr(layer, "pre_feedforward_layernorm"):
            after_mha = layer.post_attention_layernorm
        after_ffn = getattr(layer, "post_mlp_layernorm", None) or getattr(layer, "post_feedforward_layernorm", None)
        self._keep("mha", getattr(layer, "self_attn", None) if after_mha is None else after_mha)
        self._keep("ffn", getattr(layer, "mlp", None) if after_ffn is None else after_ffn)

    @property
    def gate(self) -> torch.Tensor | None:
        if self._gate is None:
            return None
        if self._gate.shape[-1] == self._outputs:
            return self._gate[..., : self.width]
        return self._ranks.joined(self._gate[..., : self.width // self._ranks.size])  # each rank has its share

    def drop(self) -> None:
        """Let go of what was kept: of a long prompt that is much."""
        self.mha = self.ffn = self._nothing
        self._gate = None

    def _keep(self, name: str, module: nn.Module | Any) -> None:
        if module is None:
            return
        forward = module.forward

        @functools.wraps(forward)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            setattr(self, name, output[0] if isinstance(output, tuple) else output)
            return output

        module.forward = keeping


def install(layers: nn.ModuleList, ranks: Ranks = ALONE) -> tuple[int, ...]:
    """Extend every decoder layer; a forward pass without a step is left as it is. Returns how many FFN gates each has.

    `forward` is wrapped, because a forward hook that sees keyword arguments takes torch's slow call path.
    """
    updates = [Updates(layer, ranks) for layer in layers]
    for index, (layer, kept) in enumerate(zip(layers, updates, strict=True)):
        layer.forward = _extended(layer.forward, index, kept)
    return tuple(kept.width for kept in updates)


def _extended(forward: Callable[..., torch.Tensor], index: int, updates: Updates) -> Callable[..., torch.Tensor]:
    @functools.wraps(forward)
    def extended(*args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(*args, **kwargs)
        step = kwargs.get("step")
        if step is None:
            return output
        before = (args[0] if args else kwargs["hidden_states"]).to(output.device)
        output = step.hooks.after_layer(index, before, output, updates)
        updates.drop()
        return output

    return extended
