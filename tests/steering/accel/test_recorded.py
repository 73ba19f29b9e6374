"""Passes as recorded operations answer as eager ones: nothing in them is a number that changes from one to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import steering
from steering.accel import prompt_graphs, prompt_step
from steering.accel.cuda_graphs import DecodeGraphs
from tests.steering.accel.recorded import Recorded
from tests.steering.parallel.asking import differences, requests, small, told
from tests.steering.triton.reference import pooled

CPU = torch.device("cpu")


@pytest.mark.slow
def test_all_kinds_of_answers_are_the_same_with_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_step, "pooled", pooled)
    monkeypatch.setattr(prompt_graphs, "PATIENCE", 0)
    mllm = steering.load(small(tmp_path / "model"), device="cpu")
    asked = requests(mllm)
    plain, ours = (
        steering.Engine(mllm, slots=6, max_length=256, self_check=False, prefill_budget=80) for _ in range(2)
    )
    graphs = DecodeGraphs(mllm, captures=Recorded)
    ours.core.runner.passes.use(graphs)
    ours.core.steps.overlap = True
    expected = told(plain, asked)
    assert differences(expected, told(ours, asked)) == []
    assert graphs.taken > 2 * len(graphs) > 20
    assert graphs.prompts.taken > 2 * len(graphs.prompts) > 30
    assert not any(form.refused for form in graphs.prompts._forms)
    taken, captured = graphs.taken, len(graphs)
    assert differences(expected, told(ours, asked)) == [], "of graphs that were captured for other answers"
    assert graphs.taken > taken
    assert len(graphs) == captured


def test_a_recording_holds_what_python_knew_and_keeps_nothing_for_long() -> None:
    given, number = torch.zeros(3), [1.0]
    kept: list[torch.Tensor] = []

    def run() -> list[torch.Tensor]:
        kept[:] = [given * 2]
        return [kept[0] + number[0]]

    recorded = Recorded()
    replay, (output,) = recorded(run, CPU)
    given.fill_(3.0)
    number[0] = 100.0
    replay()
    assert output.tolist() == [7.0] * 3
    assert bool(kept[0].isnan().all())
    other, _ = recorded(run, CPU)
    replay()
    assert output.tolist() == [7.0] * 3
    other()
    assert bool(output.isnan().all())


@pytest.mark.parametrize(
    "run", [lambda x: x[x > 0], lambda x: x * float(x.sum()), lambda x: x + torch.tensor([1.0]), torch.nonzero]
)
def test_an_operation_that_waits_for_the_host_cannot_be_recorded(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = torch.ones(3)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        Recorded()(lambda: [run(given)], CPU)
