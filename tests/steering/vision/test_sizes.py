"""Sizes of pictures stay on the CPU, and numbers reach the device, only within the block."""

from __future__ import annotations

import pytest
import torch

from steering.vision.sizes import on_the_host

META = torch.device("meta")


def test_sizes_stay_on_the_cpu_and_numbers_do_not() -> None:
    sizes = torch.tensor([[3, 4]])
    with on_the_host(META):
        assert torch.as_tensor(sizes, device=META) is sizes
        assert torch.as_tensor([3, 4], device=META).device == META
        moved = torch.tensor([3, 4], dtype=torch.int32, device=META)
        assert (moved.device, moved.dtype, moved.shape) == (META, torch.int32, (2,))
        assert torch.tensor([3.0]).tolist() == [3.0]
        assert torch.as_tensor(torch.zeros(2, device=META), device=META).device == META
    assert torch.as_tensor(sizes, device=META).device == META


def test_an_error_ends_it() -> None:
    with pytest.raises(RuntimeError, match="broken"), on_the_host(META):
        raise RuntimeError("it is broken")
    assert torch.as_tensor(torch.zeros(2), device=META).device == META


def test_a_model_on_the_cpu_is_left_alone() -> None:
    with on_the_host(torch.device("cpu")):
        assert torch.as_tensor(torch.zeros(2), device=META).device == META
