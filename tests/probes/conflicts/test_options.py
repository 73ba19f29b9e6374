"""The samples that are drawn, from a file and without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.conflicts.options import Data
from tests.probes.command_line import write_mc2


def test_a_probe_of_an_ablation_never_meets_the_evaluated_samples(tmp_path: Path) -> None:
    _, json_path, _, images = write_mc2(tmp_path, 30)
    for tasks in (frozenset[str](), frozenset(["sport"])):
        data = Data(json_path, images, tasks, seed=3)
        samples = data.draw(30, 3)
        assert len(samples) == (10 if tasks else 30)
        evaluated = data.draw(6, 3)
        probed = data.draw(20, 3, without=[sample.id for sample in evaluated])
        assert len(evaluated) == 6
        assert {sample.id for sample in probed}.isdisjoint(sample.id for sample in evaluated)
        assert {sample.id for sample in probed} == {sample.id for sample in samples[6:26]}
    different, first = (Data(json_path, images, seed=seed).draw(30, seed) for seed in (4, 3))
    assert [sample.id for sample in different] != [sample.id for sample in first]
    assert {sample.id for sample in different} == {sample.id for sample in first}


def test_without_a_demo_world_a_file_is_needed() -> None:
    with pytest.raises(ValueError, match="--mc2 is needed"):
        Data().draw(1, 0)
