"""Packed sequences attend each within itself, whatever lengths they have and in which order they lie."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steering.vision import attention
from steering.vision.attention import attend, packed_runs

CPU = torch.device("cpu")


def packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: tuple[int, ...], scaling: float
) -> torch.Tensor:
    """Stand in for `steering.triton.attention.packed` where there is a kernel."""
    parts = []
    for begin, end in itertools.pairwise(ends):
        own = (part[begin:end].transpose(0, 1) for part in (query, key, value))
        parts.append(F.scaled_dot_product_attention(*own, scale=scaling).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("lengths", [(7,), (5, 5, 5), (4, 4, 2, 4, 4, 2, 2, 2, 1), (3, 8, 3), (1, 6, 6)])
def test_each_sequence_attends_within_itself(
    lengths: tuple[int, ...], kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel:
        monkeypatch.setattr(attention, "packed", packed)
    torch.manual_seed(0)
    tokens = sum(lengths)
    query, key, value = (torch.randn(1, 3, tokens, 8, dtype=dtype) for _ in range(3))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    actual, _ = attend(nn.Identity(), query, key, value, None, cu_seq_lens_q=ends, scaling=0.4, is_causal=False)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    scores = (query.double() @ key.double().transpose(2, 3) * 0.4).masked_fill(
        sequence[:, None] != sequence, -torch.inf
    )
    expected = (scores.softmax(-1) @ value.double()).transpose(1, 2)
    assert actual.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_given_number_of_equal_sequences_replaces_their_ends() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 3, 15, 8) for _ in range(3))
    ends = torch.tensor([0, 5, 10, 15])
    expected, _ = attend(nn.Identity(), query, key, value, None, cu_seq_lens_q=ends)
    actual, _ = attend(nn.Identity(), query, key, value, None, cu_seq_lens_q=torch.zeros(0), alike=3)
    assert torch.equal(actual, expected)


def test_sequences_of_one_length_attend_in_one_call() -> None:
    assert packed_runs((0, 4, 8, 12), CPU) == (((3, 4),), None, None)
    runs, order, back = packed_runs((0, 4, 6, 10, 10, 12), CPU)
    assert runs == ((2, 4), (2, 2))
    assert order is not None
    assert back is not None
    assert order.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 4, 5, 10, 11]
    assert order[back].tolist() == list(range(12))
