"""Products of a decode as operators, which compiled steps call as loops of our own (`loops.cpp`).

Of attention, a compiler makes slow loops: it turns the query anew at each column, and waits for each sum before it begins
the next. A library's matrix product is called for each row and head, which takes longer than what it computes; and for two
rows of a layer it reads the weight twice. What is computed here, where no step is compiled, says what they are.
"""

from __future__ import annotations

from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


@torch.library.custom_op("helmsight::decode_scores", mutates_args=())
def decode_scores(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float32 products (rows, kv_heads, group, columns) of queries (rows, kv_heads, group, head_dim), float32 and
    contiguous, with keys (rows, kv_heads, columns, head_dim); 0 on columns behind each row's position (rows,)."""
    found = query @ key.float().transpose(-1, -2)
    return found.masked_fill_(_behind(positions, key.shape[2]), 0.0)


@torch.library.custom_op("helmsight::decode_sums", mutates_args=())
def decode_sums(weights: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Float32 sums (rows, kv_heads, group, head_dim) of values (rows, kv_heads, columns, head_dim) by weights (rows,
    kv_heads, group, columns), float32 and contiguous, of which those behind each row's position (rows,) are 0."""
    return weights.masked_fill(_behind(positions, value.shape[2]), 0.0) @ value.float()


@torch.library.custom_op("helmsight::few_linear", mutates_args=())
def few_linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """(rows, outputs): a linear layer of a few states (rows, width), float32 and contiguous, and a weight (outputs, width)
    that `suits`."""
    return torch.nn.functional.linear(states, weight, bias)


def suits(weight: torch.Tensor) -> bool:
    """Whether `few_linear` is for such a weight: float32, laid out by column, as models are loaded on a CPU, or by row."""
    by_column, by_row = weight.t().is_contiguous(), weight.is_contiguous()
    fits = (by_column and weight.shape[0] % 16 == 0) or (by_row and weight.shape[0] % 4 == 0)
    return fits and weight.dtype == torch.float32


def _behind(positions: torch.Tensor, columns: int) -> torch.Tensor:
    """(rows, 1, 1, columns) bool."""
    return torch.arange(columns, device=positions.device) > positions[:, None, None, None]


@decode_scores.register_fake
def _(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return query.new_empty(*query.shape[:3], key.shape[2])


@decode_sums.register_fake
def _(weights: torch.Tensor, value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return weights.new_empty(*weights.shape[:3], value.shape[3])


@few_linear.register_fake
def _(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return states.new_empty(states.shape[0], weight.shape[0])


_THIRD = {"decode_scores": "AtenTensorHandle", "decode_sums": "AtenTensorHandle", "few_linear": "AtenTensorHandle*"}
SHIMS = {
    getattr(torch.ops.helmsight, name).default: [
        f"AOTITorchError aoti_torch_cpu_{name}(AtenTensorHandle, AtenTensorHandle, {third}, AtenTensorHandle*)"
    ]
    for name, third in _THIRD.items()
}
"""What torch is to call for them in what it compiles."""
