"""The linear layers of a step by kernels that suit its number of tokens.

Of several, by oneDNN's over weights that lie as those read them, and layers of the same input in one product: without that
most of the time goes into bringing weights into order. Of few, by our own (`decoder/loops.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from steering.decoder import loops, packed

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What layers of the same input are called in families that have them apart."""
Groups = list[tuple[nn.Linear, ...]]


def groups_of(modules: Iterable[nn.Module], dtype: torch.dtype) -> Groups:
    """The linear layers among modules and below them, those of the same input together; none where there are no kernels."""
    found: Groups = []
    for module in modules if packed.supported(dtype) else ():
        for parent in module.modules():
            own = {name: one for name, one in parent.named_children() if isinstance(one, nn.Linear) and _plain(one)}
            for names in TOGETHER:
                together = tuple(own[name] for name in names if name in own)
                if len(together) == len(names) and len({one.bias is None for one in together}) == 1:
                    found.append(together)
                    own = {name: one for name, one in own.items() if name not in names}
            found += [(one,) for one in own.values()]
        if isinstance(module, nn.Linear) and _plain(module):
            found.append((module,))
    return found


def _plain(layer: nn.Linear) -> bool:
    """Whether it computes what its name says, and not in integers."""
    return type(layer) in (nn.Linear, packed.PackedLinear)


def joined(groups: Groups) -> dict[str, torch.Tensor]:
    """The weights (out, in) of each group, and its biases (out,), one behind the other, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for number, group in enumerate(groups):
        tensors[f"weight_{number}"] = torch.cat([one.weight.detach() for one in group])
        if group[0].bias is not None:
            tensors[f"bias_{number}"] = torch.cat([one.bias.detach() for one in group])
    return tensors


def packed_weights(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `joined` gave, the weights as oneDNN's kernels read them."""
    return {name: packed.reordered(one) if one.ndim == 2 else one for name, one in tensors.items()}


class Few(TorchFunctionMode):
    """Has the float32 layers among modules, and below them, be computed by our own loops while a step is traced."""

    def __init__(self, modules: Iterable[nn.Module]):
        super().__init__()
        layers = (one for module in modules for one in module.modules() if isinstance(one, nn.Linear) and _plain(one))
        self._weights = {id(one.weight) for one in layers if loops.suits(one.weight)}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.linear or len(args) < 2 or id(args[1]) not in self._weights:
            return function(*args, **kwargs)
        states, weight = args[:2]
        made = loops.few_linear(states.reshape(-1, weight.shape[1]).contiguous(), weight, *args[2:], **kwargs)
        return made.view(*states.shape[:-1], weight.shape[0])


class Packing(TorchFunctionMode):
    """Has the layers of groups be computed by oneDNN while a step is traced."""

    def __init__(self, groups: Groups, tensors: Callable[[str], torch.Tensor | None]):
        super().__init__()
        self._tensors = tensors
        self._places: dict[int, tuple[int, slice]] = {}
        for number, group in enumerate(groups):
            first = 0
            for one in group:
                self._places[id(one.weight)] = number, slice(first, first + one.out_features)
                first += one.out_features
        self._last: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        place = self._places.get(id(args[1])) if function is nn.functional.linear and len(args) > 1 else None
        if place is None:
            return function(*args, **kwargs)
        (number, part), states = place, args[0]
        if self._last is None or self._last[0] != number or self._last[1] is not states:
            weight, bias = self._tensors(f"weight_{number}"), self._tensors(f"bias_{number}")
            made = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
            self._last = number, states, made
        return self._last[2][..., part]
