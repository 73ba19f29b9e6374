"""The check that a kernel passes before it truncates distributions."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

import steering.triton
from steering.runner.truncation import Truncation, _thresholds
from steering.triton import truncation
from steering.triton.truncation import is_right, thresholds_kernel

CPU = torch.device("cpu")


def by_sorting(scaled: torch.Tensor, *limits: torch.Tensor) -> torch.Tensor:
    return _thresholds(scaled, Truncation(*limits), [scaled.shape[-1]])


def test_sorting_is_right() -> None:
    assert is_right(by_sorting, CPU)


@pytest.mark.parametrize("more", [False, True], ids=["one token less", "one token more"])
@pytest.mark.parametrize("row", range(8))
def test_a_wrong_threshold_of_any_row_is_found(row: int, more: bool) -> None:
    if more and row in (0, 7):
        pytest.skip("it keeps everything")

    def wrong(scaled: torch.Tensor, *limits: torch.Tensor) -> torch.Tensor:
        least, ordered = by_sorting(scaled, *limits), scaled[row].sort(descending=True).values
        kept = int((ordered.isfinite() & (ordered >= least[row])).sum())
        least[row] = ordered[kept if more else kept - 2]  # every row keeps several
        return least

    assert not is_right(wrong, CPU)


def test_a_threshold_that_is_no_number_is_found() -> None:
    assert not is_right(lambda scaled, *limits: by_sorting(scaled, *limits) * torch.nan, CPU)


def test_there_is_no_kernel_without_a_gpu() -> None:
    assert thresholds_kernel(CPU) is None


@pytest.mark.parametrize("error", [None, "no compiler", "wrong"])
def test_a_kernel_that_fails_or_is_wrong_is_not_used(
    error: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def thresholds(scaled: torch.Tensor, *limits: torch.Tensor) -> torch.Tensor:
        if error == "no compiler":
            raise RuntimeError(error)
        return by_sorting(scaled, *limits) - float(error == "wrong")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(truncation, "is_right", lambda kernel, device: is_right(kernel, CPU))
    module = "steering.triton.triton_truncation"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(thresholds=thresholds))  # type: ignore[arg-type]
    monkeypatch.setattr(steering.triton, "triton_truncation", sys.modules[module], raising=False)
    kernel = thresholds_kernel.__wrapped__(torch.device("cuda", 0))
    assert kernel is (thresholds if error is None else None)
    assert ("top_p and top_k sort the vocabulary" in caplog.text) == (error is not None)
