"""Packed weights of a step's linear layers, in the memory order of the kernels; layers of one input are joined.

In float32 the kernels are our own (`kernels.linear`), in half precision those of oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steering.cpu.kernels.linear import narrowest, packed_in_blocks, packed_linear
from steering.decoder import packed
from steering.model.mllm import MLLM

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The names of layers with the same input, in families that have them as separate layers."""
Groups = list[tuple[nn.Linear, ...]]


def groups_of(modules: Iterable[nn.Module], dtype: torch.dtype) -> Groups:
    """Return the linear layers in modules, those of the same input together; none where there are no kernels."""
    groups: Groups = []
    for module in modules if dtype == torch.float32 or packed.supported(dtype) else ():
        for parent in module.modules():
            layers = {
                name: layer for name, layer in parent.named_children() if isinstance(layer, nn.Linear) and _plain(layer)
            }
            for names in TOGETHER:
                together = tuple(layers[name] for name in names if name in layers)
                if len(together) == len(names) and len({layer.bias is None for layer in together}) == 1:
                    groups.append(together)
                    layers = {name: layer for name, layer in layers.items() if name not in names}
            groups += [(layer,) for layer in layers.values()]
        if isinstance(module, nn.Linear) and _plain(module):
            groups.append((module,))
    return groups


def _plain(layer: nn.Linear) -> bool:
    """Return True for a plain linear layer, not one that computes in integers."""
    return type(layer) in (nn.Linear, packed.PackedLinear)


class PackedWeights:
    """The weights of a model's linear layers for its steps, joined once for all of them.

    groups: the layers that are joined. dtypes: the dtypes of the weights where this model's own values are not loaded, taken
    from a model with values.
    """

    def __init__(self, mllm: MLLM, dtypes: Mapping[str, str] | None = None):
        tower = mllm.whole_tower
        modules = [*mllm.layers, mllm.model.get_output_embeddings(), *([] if tower is None else [tower])]
        self.groups = groups_of(modules, mllm.dtype)
        self.tensors = joined(self.groups, dtypes)
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self.tensors.items()}


def joined(groups: Groups, dtypes: Mapping[str, str] | None = None) -> dict[str, torch.Tensor]:
    """Return the weights of each group, float32 ones in blocks, and its concatenated biases (out,), by name."""
    tensors: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups):
        name, weight = f"weight_{number}", torch.cat([layer.weight.detach() for layer in group])
        if weight.dtype == torch.float32:
            narrowed = narrowest(weight) if dtypes is None else weight.to(getattr(torch, dtypes[name]))
            weight = packed_in_blocks(narrowed)
        tensors[name] = weight
        if group[0].bias is not None:
            tensors[f"bias_{number}"] = torch.cat([layer.bias.detach() for layer in group])
    return tensors


def reordered(joined: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `joined` in the order that its kernels read."""
    return packed.reordered(joined) if joined.ndim == 2 else joined


class Packing(TorchFunctionMode):
    """Computes the layers of groups over packed weights while a step is traced."""

    def __init__(self, groups: Groups, tensors: Callable[[str], torch.Tensor | None]):
        super().__init__()
        self._tensors = tensors
        self._places: dict[int, tuple[int, slice]] = {}
        self._outputs = [sum(layer.out_features for layer in group) for group in groups]
        for number, group in enumerate(groups):
            first = 0
            for layer in group:
                self._places[id(layer.weight)] = number, slice(first, first + layer.out_features)
                first += layer.out_features
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._places.get(id(args[1])) if function is nn.functional.linear and len(args) > 1 else None
        if place is None:
            return function(*args, **kwargs)
        (number, part), states = place, args[0]
        if self._last is None or self._last[0] != number or self._last[1] is not states:
            weight, bias = self._tensors(f"weight_{number}"), self._tensors(f"bias_{number}")
            assert weight is not None
            if weight.ndim == 3:
                output = packed_linear(states.contiguous(), weight, bias, self._outputs[number])
            else:
                output = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
            self._last = number, states, output
        return self._last[2][..., part]
