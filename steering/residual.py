"""What happens to the residual stream behind each decoder layer: updates are damped, vectors added, states read.

The layers are extended once, at load, and find their settings in the step that travels with the forward pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from steering.interventions.think import ThinkRows

if TYPE_CHECKING:
    from steering.diagnostics.residual import ResidualRows

TEXT, IMAGE = 0, 1
"""Classes of prompt tokens that a vector may be added to separately; where images are told apart, the first is IMAGE, the
second the next number, and so on."""


class Updates:
    """The two updates that a layer adds to the residual stream, (rows, n, d), and the pre-activations of its FFN's gates
    (rows, n, width), None where it has no such; kept while the layer runs.

    Where a family normalises behind a sub-block, the update is what leaves that norm. `width` is the number of gates, 0
    where there are none; `activation` the function behind them.
    """

    def __init__(self, layer: nn.Module):
        self._nothing = self.mha = self.ffn = torch.empty(0)
        self._gate: torch.Tensor | None = None
        mlp = getattr(layer, "mlp", None)
        fused = getattr(mlp, "gate_up_proj", None)  # whose first half are the gates
        self._gates = 2 if isinstance(fused, nn.Linear) else 1
        gates = fused if isinstance(fused, nn.Linear) else getattr(mlp, "gate_proj", None)
        self.width = gates.out_features // self._gates if isinstance(gates, nn.Linear) else 0
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
        return None if self._gate is None else self._gate[..., : self.width]

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


def install(layers: nn.ModuleList) -> tuple[int, ...]:
    """Extend every decoder layer; a forward pass without a step is left as it is. Returns how many FFN gates each has.

    `forward` is wrapped, because a forward hook that sees keyword arguments takes torch's slow call path.
    """
    updates = [Updates(layer) for layer in layers]
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
        before = args[0] if args else kwargs["hidden_states"]
        output = step.residual.after_layer(index, before, output, updates)
        updates.drop()
        return output

    return extended


class DecodeResidual:
    """What is added to each row's token. delta: (layers, rows, d), zero where a row is not steered: the same work for
    every batch. think: the damping that comes before, None where no row thinks. readout: what measures the updates."""

    def __init__(self, delta: torch.Tensor, think: ThinkRows | None = None, readout: ResidualRows | None = None):
        self._by_layer = delta.unsqueeze(2).unbind(0)  # views (rows, 1, d)
        self.think = think
        self.readout = readout

    def after_layer(self, layer: int, before: torch.Tensor, hidden: torch.Tensor, updates: Updates) -> torch.Tensor:
        plain = hidden
        if self.think is not None:
            hidden = self.think.damp(layer, hidden, updates.mha, updates.ffn)
        out = hidden + self._by_layer[layer]
        if self.readout is not None:
            self.readout.keep(layer, before, plain, updates, out)
        return out


@dataclass
class PrefillResidual:
    """classes: (rows, n, classes) one-hot, zero on padding. delta: for each steered layer (rows, classes, d).

    norms: for each steered layer (rows, 2, classes), how many tokens the class has and the sum over them of |h| before the
    addition.
    at: (rows,) index of the token where the residual stream is to be read into `states` (layers, rows, d), else None.
    """

    classes: torch.Tensor
    delta: dict[int, torch.Tensor] = field(default_factory=dict)
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    at: torch.Tensor | None = None
    states: torch.Tensor | None = None
    think: ThinkRows | None = None
    readout: ResidualRows | None = None

    def after_layer(self, layer: int, before: torch.Tensor, hidden: torch.Tensor, updates: Updates) -> torch.Tensor:
        plain = hidden
        if self.think is not None:
            hidden = self.think.damp(layer, hidden, updates.mha, updates.ffn)
        if layer in self.delta:
            length = hidden.float().norm(dim=-1)
            self.norms[layer] = torch.stack([torch.ones_like(length), length], 1) @ self.classes
            hidden = hidden + (self.classes.to(hidden.dtype) @ self.delta[layer])
        if self.readout is not None:
            self.readout.keep(layer, before, plain, updates, hidden)
        if self.at is not None and self.states is not None:
            self.states[layer] = hidden[torch.arange(len(hidden), device=hidden.device), self.at]
        return hidden
