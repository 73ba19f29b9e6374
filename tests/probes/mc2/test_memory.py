"""Peaks of memory against what is really allocated."""

from __future__ import annotations

import mmap

import pytest
import torch

from probes.mc2 import memory

CPU = torch.device("cpu")


@pytest.mark.skipif(not memory._CLEAR.exists(), reason="the system does not tell")
def test_a_peak_is_measured_since_its_reset() -> None:
    memory.forget_peak(CPU)
    before = memory.peak(CPU)
    with mmap.mmap(-1, 200_000_000) as held:  # pages of its own: an allocator may have as many left from before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    after = memory.peak(CPU)
    memory.forget_peak(CPU)
    later = memory.peak(CPU)
    assert before is not None
    assert after is not None
    assert later is not None
    assert after - before == pytest.approx(200, abs=20)
    assert after - later == pytest.approx(200, abs=20)


def test_there_is_no_peak_if_the_system_does_not_report_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CLEAR", memory.Path("/nowhere"))
    memory.forget_peak(CPU)
    assert memory.peak(CPU) is None
