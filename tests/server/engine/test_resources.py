"""The process's memory and CPUs are those that its control group leaves it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from server.engine import local, resources
from server.settings import Settings

V1 = "9:name=systemd:/\n3:cpuacct:/else\n2:cpu:{0}\n0::/else\n"


def v1(folder: str, quota: int) -> dict[str, str]:
    return {f"cpu{folder}/cpu.cfs_quota_us": f"{quota}\n", f"cpu{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("own", "files", "quota"),
    [
        (None, {}, None),
        (None, {"cpu.max": "150000 100000"}, 1.5),
        (None, v1("", 200_000), 2.0),
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "nonsense"}, None),
        ("0::/a.slice/b", {"a.slice/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/a.slice/b", {"a.slice/cpu.max": "50000 100000", "a.slice/b/cpu.max": "150000 100000"}, 0.5),
        ("0::/a.slice/b", {"a.slice/cpu.max": "150000 100000", "a.slice/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a.slice/b", {"a.slice/cpu.max": "nonsense", "a.slice/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a.slice/b", {"other/cpu.max": "50000 100000", "a.slice/c/cpu.max": "50000 100000"}, None),
        ("0::/docker/unseen", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/../beside", {"../beside/cpu.max": "50000 100000", "cpu.max": "250000 100000"}, 2.5),
        (V1.format("/"), v1("", -1), None),
        (V1.format("/"), v1("", 200_000), 2.0),
        (V1.format("/a/b:c"), {**v1("", -1), **v1("/a", 300_000), **v1("/a/b:c", 100_000)}, 1.0),
        (V1.format("/a/b"), {**v1("", -1), **v1("/a", 100_000), **v1("/a/b", 300_000)}, 1.0),
        (V1.format("/a").replace("cpu:", "cpu,cpuacct:"), v1("/a", 100_000), 1.0),
        (V1.format("/a"), v1("/else", 100_000), None),
        (V1.format("/docker/unseen"), v1("", 200_000), 2.0),
    ],
)
def test_the_quota_is_the_least_of_the_groups_that_the_process_is_in(
    own: str | None, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    root = tmp_path / "cgroup"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert resources.cpu_quota(root, tmp_path / "own") == quota


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
