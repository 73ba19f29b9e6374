"""Linear layers with weights in the memory order of oneDNN's kernels, on a CPU.

Otherwise each product reorders them, which for the few rows of a decode step takes longer than the product. The values are
those of the model; only the order of a sum's terms may differ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ROWS = 16
"""The number of rows for which the order is chosen; it is as good for 1 and for 500."""
LEAST = {torch.float32: 2**19, torch.bfloat16: 2**18, torch.float16: 2**18}
"""Elements of the smallest weight for which packing pays, by dtype; a packed call takes 10 us more."""


class PackedLinear(nn.Linear):
    """A linear layer that `prepare` converted from a plain one, and that computes as before until `pack`."""

    packed: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The weight (out, in); recomputed at each call where it is packed."""
        weight = self._parameters["weight"]
        if weight is not None:
            return weight
        assert self.packed is not None
        return self.packed.to_dense()

    def pack(self, keep: bool = False) -> None:
        """Reorder the weight; free the original unless `keep`."""
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
    """Return a weight (out, in) in the order that the kernels read."""
    tensor: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return tensor


def prepare(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert every linear layer that is faster packed, of a model on the CPU and in place, to one that can be packed."""
    if not supported(dtype):
        return
    for module in model.modules():
        if type(module) is not nn.Linear or "forward" in vars(module):  # wrapped by others
            continue
        if module.weight.dtype == dtype and module.weight.numel() >= LEAST[dtype]:
            module.__class__ = PackedLinear
            vars(module)["packed"] = None


def pack(model: Any) -> None:
    """Reorder the weights of all layers that were prepared and not yet packed.

    Weights that other modules share are kept for them, and the output layer's for callers that read single rows.
    """
    head = model.get_output_embeddings()
    for module in [layer for layer in model.modules() if isinstance(layer, PackedLinear) and layer.packed is None]:
        module.pack(keep=module is head)


def packed_bytes(model: nn.Module) -> int:
    """Return the bytes of the packed weights whose originals were freed."""
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    return sum(
        layer.packed.nbytes for layer in layers if layer.packed is not None and layer._parameters["weight"] is None
    )


def supported(dtype: torch.dtype) -> bool:
    """Return True where this processor and this torch have such kernels."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_reorder_linear_weight"):
        return False
    checks = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype in LEAST and (dtype not in checks or bool(getattr(ops, checks[dtype])()))
