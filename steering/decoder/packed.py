"""Linear layers whose weights lie as oneDNN's kernels read them, on a CPU: otherwise each product brings them into that
order anew, which for the few rows of a decode step takes longer than the product.

The values are those of the model; only the order of a sum's terms may be another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS = 16
"""For how many rows the order is chosen; it is as good for 1 and for 500."""
LEAST = {torch.float32: 2**19, torch.bfloat16: 2**18, torch.float16: 2**18}
"""By dtype: elements of the smallest weight for which it pays; a call takes 10 us more."""


class PackedLinear(nn.Linear):
    """A linear layer that `prepare` made of another, and that computes as that does until `pack`."""

    packed: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """(out, in); made anew at each call where it is packed."""
        own = self._parameters["weight"]
        if own is not None:
            return own
        assert self.packed is not None
        return self.packed.to_dense()

    def pack(self, keep: bool = False) -> None:
        """Order the weight; unless it is to be kept, too, its memory is given back."""
        dense = self.weight.detach().contiguous()
        self.packed = reordered(dense)
        if not keep:
            self._parameters["weight"] = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.packed is None or states.dtype != self.packed.dtype:
            return nn.functional.linear(states, self.weight.to(states.dtype), self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")
        return out


def reordered(weight: torch.Tensor) -> torch.Tensor:
    """A weight (out, in) as the kernels read it."""
    made: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return made


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Have every linear layer of a model on the CPU that is faster for it be one that can be packed, in its place."""
    if not supported(dtype):
        return
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):  # which others have wrapped
            continue
        if module.weight.dtype == dtype and module.weight.numel() >= LEAST[dtype]:
            module.__class__ = PackedLinear
            vars(module)["packed"] = None


def pack(model: Any) -> None:
    """Order the weights of all that were prepared, and not packed yet. What other modules share is kept for them, and the
    output's for who reads single rows of it."""
    head = model.get_output_embeddings()
    for module in [one for one in model.modules() if isinstance(one, PackedLinear) and one.packed is None]:
        module.pack(keep=module is head)


def packed_bytes(model: nn.Module) -> int:
    """Of the weights that were packed and not kept."""
    layers = [one for one in model.modules() if isinstance(one, PackedLinear)]
    return sum(one.packed.nbytes for one in layers if one.packed is not None and one._parameters["weight"] is None)


def supported(dtype: torch.dtype) -> bool:
    """Whether this processor, and this torch, have such kernels."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_reorder_linear_weight"):
        return False
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in LEAST and (dtype not in checks or bool(getattr(ops, checks[dtype])()))
