"""What the process has to answer with is what its control group leaves it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from server.process import local, resources
from server.settings import Settings


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu.max": "nonsense"}, None),
    ],
)
def test_the_quota_of_a_control_group_is_read(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert resources.cpu_quota(tmp_path) == quota


def test_the_engine_has_as_many_threads_as_the_process_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    for quota, threads in ((None, 8), (2.5, 2), (0.5, 1), (16.0, 8)):
        monkeypatch.setattr(resources, "cpu_quota", lambda quota=quota: quota)
        assert local.engine_threads(Settings()) == threads
    assert local.engine_threads(Settings(threads=5)) == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(resources, "cpu_quota", lambda: None)
    assert local.engine_threads(Settings()) == 1, "OMP_NUM_THREADS, which torch heeds, may ask for fewer"


def test_what_is_loaded_is_left_to_the_end() -> None:
    """The garbage collector looks through what came later alone."""
    try:
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        resources.keep_what_is_loaded()
        later = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        looked_at = {id(one) for one in gc.get_objects()}
        assert not {id(one) for one in kept} & looked_at
        assert {id(one) for one in later} <= looked_at
    finally:
        gc.unfreeze()


def test_the_interpreter_is_handed_on_within_a_step() -> None:
    own = sys.getswitchinterval()
    try:
        resources.share_interpreter()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(own)
