"""The two updates that each decoder layer adds to the residual stream, and the hooks after each layer.

The layers are extended once, at load, and find their hooks in the step that travels with the forward pass. Families add
updates in different ways: as a sub-block leaves them, after a norm, or scaled. A traced pass determines which outputs are
added, so that a layer's input and its updates sum to its output (`steering.model.following.additions`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from steering.decoder.ranks import ALONE, Ranks

Terms = Mapping[nn.Module, float]
"""A sum of the outputs of modules: the factor of each."""


class Updates:
    """The two updates that a layer adds to the residual stream, (rows, n, d), and its FFN's gate pre-activations.

    The pre-activations are (rows, n, width), None without gates. All are kept while the layer runs. `known` is True where
    the updates are known; otherwise there are none. They are added to the layer's input times `kept`, a factor of the
    layer. `width` is the number of gates, 0 without; `activation` the function after them.
    """

    def __init__(self, layer: nn.Module, ranks: Ranks = ALONE):
        self._ranks = ranks
        self._nothing = torch.empty(0)
        self._terms: tuple[Terms, Terms] = {}, {}  # for attention's update and the FFN's
        self._outputs: dict[nn.Module, torch.Tensor] = {}
        self._gate: torch.Tensor | None = None
        self.kept = 1.0
        mlp = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
        fused = getattr(mlp, "gate_up_proj", None)  # its first half are the gates
        self._gates = 2 if isinstance(fused, nn.Linear) else 1
        gates = fused if isinstance(fused, nn.Linear) else getattr(mlp, "gate_proj", getattr(mlp, "w1", None))
        self._width = gates.out_features if isinstance(gates, nn.Linear) else 0
        self.width = self._width // self._gates
        self.activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None) or nn.functional.silu
        if gates is not None:
            _forward_to(gates, functools.partial(setattr, self, "_gate"))

    def stream(self, before: torch.Tensor) -> torch.Tensor:
        """Return the residual stream to which the updates are added. before: (rows, n, d), the layer's input."""
        return before if self.kept == 1 else before * self.kept

    @property
    def mha(self) -> torch.Tensor:
        return self._sum(self._terms[0])

    @property
    def ffn(self) -> torch.Tensor:
        return self._sum(self._terms[1])

    @property
    def known(self) -> bool:
        return all(self._terms)

    @property
    def gate(self) -> torch.Tensor | None:
        if self._gate is None:
            return None
        if self._gate.shape[-1] == self._width:
            return self._gate[..., : self.width]
        return self._ranks.joined(self._gate[..., : self.width // self._ranks.size])  # each rank has its share

    def drop(self) -> None:
        """Free what was kept, which for a long prompt is large."""
        self._outputs.clear()
        self._gate = None

    def keep(self, mha: Terms, ffn: Terms, kept: float = 1.0) -> None:
        """Keep the outputs whose sums are attention's update and the FFN's; without terms they stay unknown."""
        self._terms, self.kept = (mha, ffn), kept
        for module in (*mha, *ffn):
            _forward_to(module, functools.partial(self._outputs.__setitem__, module))

    def _sum(self, terms: Terms) -> torch.Tensor:
        parts = [
            output if factor == 1 else output * factor
            for module, factor in terms.items()
            if (output := self._outputs.get(module)) is not None
        ]
        return sum(parts[1:], parts[0]) if parts else self._nothing


def _forward_to(module: nn.Module, receive: Callable[[torch.Tensor], object]) -> None:
    """Pass every output of a module to `receive`, too."""
    forward = module.forward

    @functools.wraps(forward)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        receive(output[0] if isinstance(output, tuple) else output)
        return output

    module.forward = keeping


def install(layers: nn.ModuleList, ranks: Ranks = ALONE) -> tuple[Updates, ...]:
    """Extend every decoder layer; return each layer's updates, which are unknown until `Updates.keep`.

    A forward pass without a step is left as it is. `forward` is wrapped, because a forward hook that sees keyword arguments
    takes torch's slow call path.
    """
    updates = tuple(Updates(layer, ranks) for layer in layers)
    for index, (layer, update) in enumerate(zip(layers, updates, strict=True)):
        layer.forward = _extend_forward(layer.forward, index, update)
    return updates


def _extend_forward(forward: Callable[..., torch.Tensor], index: int, updates: Updates) -> Callable[..., torch.Tensor]:
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
