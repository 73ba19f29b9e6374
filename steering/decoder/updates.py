"""The two updates that each decoder layer adds to the residual stream, and the point behind it where hooks are called.

The layers are extended once, at load, and find their hooks in the step that travels with the forward pass. Families add
updates in different ways: as a sub-block leaves them, behind a norm, or scaled. `trace` follows one pass and keeps what is
added, so that a layer's input and its updates sum to its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from steering.decoder.additions import Additions, Terms
from steering.decoder.ranks import ALONE, Ranks


class Updates:
    """The two updates that a layer adds to the residual stream, (rows, n, d), and the pre-activations of its FFN's gates
    (rows, n, width), None where it has no such; kept while the layer runs.

    `traced` tells whether it is known where the layer adds them; without that there are none. `width` is the number of
    gates, 0 where there are none; `activation` the function behind them.
    """

    def __init__(self, layer: nn.Module, ranks: Ranks = ALONE):
        self._ranks = ranks
        self._nothing = torch.empty(0)
        self._terms: tuple[Terms, Terms] = {}, {}  # of attention's update and of the FFN's
        self._outputs: dict[nn.Module, torch.Tensor] = {}
        self._gate: torch.Tensor | None = None
        mlp = getattr(layer, "mlp", None)
        fused = getattr(mlp, "gate_up_proj", None)  # whose first half are the gates
        self._gates = 2 if isinstance(fused, nn.Linear) else 1
        gates = fused if isinstance(fused, nn.Linear) else getattr(mlp, "gate_proj", None)
        self._width = gates.out_features if isinstance(gates, nn.Linear) else 0
        self.width = self._width // self._gates
        self.activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None) or nn.functional.silu
        if gates is not None:
            _forward_to(gates, functools.partial(setattr, self, "_gate"))

    @property
    def mha(self) -> torch.Tensor:
        return self._sum(self._terms[0])

    @property
    def ffn(self) -> torch.Tensor:
        return self._sum(self._terms[1])

    @property
    def traced(self) -> bool:
        return all(self._terms)

    @property
    def gate(self) -> torch.Tensor | None:
        if self._gate is None:
            return None
        if self._gate.shape[-1] == self._width:
            return self._gate[..., : self.width]
        return self._ranks.joined(self._gate[..., : self.width // self._ranks.size])  # each rank has its share

    def drop(self) -> None:
        """Let go of what was kept: of a long prompt that is much."""
        self._outputs.clear()
        self._gate = None

    def keep(self, terms: tuple[Terms, Terms]) -> None:
        """From now on, keep the outputs that the updates are sums of."""
        self._terms = terms
        for module in (*terms[0], *terms[1]):
            _forward_to(module, functools.partial(self._outputs.__setitem__, module))

    def _sum(self, terms: Terms) -> torch.Tensor:
        parts = [
            output if factor == 1 else output * factor
            for module, factor in terms.items()
            if (output := self._outputs.get(module)) is not None
        ]
        return sum(parts[1:], parts[0]) if parts else self._nothing


def _forward_to(module: nn.Module, receive: Callable[[torch.Tensor], object]) -> None:
    """Hand every output of a module to `receive`, too."""
    forward = module.forward

    @functools.wraps(forward)
    def keeping(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        receive(output[0] if isinstance(output, tuple) else output)
        return output

    module.forward = keeping


class LayerUpdates:
    """The updates of all decoder layers. `widths` counts each layer's FFN gates."""

    def __init__(self, layers: nn.ModuleList, ranks: Ranks):
        self._layers = layers
        self._updates = [Updates(layer, ranks) for layer in layers]
        self.widths = tuple(one.width for one in self._updates)
        self._tracing: Additions | None = None
        self._tried = False
        for index, layer in enumerate(layers):
            layer.forward = self._extended(layer.forward, index)

    @property
    def traced(self) -> bool:
        """Whether every layer's updates are known."""
        return all(one.traced for one in self._updates)

    @contextmanager
    def trace(self) -> Iterator[None]:
        """Find out, in the one pass that is run within, what each layer adds; only the first time."""
        if self._tried:
            yield
            return
        found: dict[int, tuple[Terms, Terms]] = {}
        with Additions(self._layers, found) as self._tracing:
            yield
        self._tracing, self._tried = None, True
        for index, terms in found.items():
            self._updates[index].keep(terms)

    def _extended(self, forward: Callable[..., torch.Tensor], index: int) -> Callable[..., torch.Tensor]:
        updates = self._updates[index]

        @functools.wraps(forward)
        def extended(*args: Any, **kwargs: Any) -> torch.Tensor:
            output = forward(*args, **kwargs)
            step = kwargs.get("step")
            if step is None:
                return output
            before = args[0] if args else kwargs["hidden_states"]
            if self._tracing is not None:
                self._tracing.finish(index, output)
            output = step.hooks.after_layer(index, before.to(output.device), output, updates)
            updates.drop()
            return output

        return extended


def install(layers: nn.ModuleList, ranks: Ranks = ALONE) -> LayerUpdates:
    """Extend every decoder layer; a forward pass without a step is left as it is.

    `forward` is wrapped, because a forward hook that sees keyword arguments takes torch's slow call path.
    """
    return LayerUpdates(layers, ranks)
