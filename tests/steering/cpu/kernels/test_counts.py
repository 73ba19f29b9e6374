"""Counts of decodes, by the loops and in torch, compared with row-by-row sums in double precision."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from steering.cpu.kernels import counts, stream
from steering.recorders.counting import NEVER
from tests.steering.cpu.kernels.conftest import BUILT, COMPILER, PROCESSORS, Loops

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="there is no compiler"),
    pytest.mark.parametrize("loops", BUILT[1:], indirect=True, ids=[PROCESSORS[index][0] for index in (1, 2)]),
]
POSITIONS = torch.tensor([9, 4, 0, 7, 10])
ACTIVE = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])[:, None, None]
COUNTED = torch.tensor([8, 4, -1, 3, NEVER])
"""The second row was counted, the fourth is not active, of the last nothing is asked."""
NEW = [True, False, True, False, False]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=1e-5, atol=1e-5, equal_nan=True)


def both(
    loops: Loops, name: str, arguments: tuple[Any, ...], before: list[torch.Tensor]
) -> list[tuple[Any, list[torch.Tensor]]]:
    """Run a loop and its counterpart in torch, and return each one's result with its copies of the slots' tensors.

    Each is called twice: a step that runs again counts once.
    """
    results = []
    for call in (lambda *args: loops(name, *args), getattr(stream if name == "count_stream" else counts, name)):
        copies = [tensor.clone() for tensor in before]
        returned = [call(*arguments, *copies) for _ in range(2)]
        results.append((returned[0], copies))
        if returned[0] is not None:
            assert torch.equal(returned[0], returned[1])
    return results


@pytest.mark.parametrize(("layers", "columns", "spans"), [(1, 11, 1), (4, 37, 11), (2, 64, 20), (2, 12, 33)])
def test_attention_is_counted_as_in_torch(loops: Loops, layers: int, columns: int, spans: int) -> None:
    random = torch.Generator().manual_seed(0)
    rows, length = len(NEW), columns + 5
    means = [torch.rand(rows, columns, generator=random).softmax(-1) for _ in range(layers)]
    table = (torch.rand(rows, length, spans, generator=random) > 0.5).float()
    table[2] = 0.0  # a window that holds none of the three
    sources = (torch.rand(rows, spans, 3, generator=random) > 0.3).float()
    sums, decay = (
        torch.rand(rows, layers, spans, generator=random),
        torch.rand(rows, length, layers, 3, generator=random),
    )
    patches = torch.rand(rows, layers, length, generator=random)
    arguments = means, table, POSITIONS, sources, ACTIVE
    for stacked, (counted, summed, shares, by_column) in both(
        loops, "count_attention", arguments, [COUNTED, sums, decay, patches]
    ):
        close(stacked, torch.stack(means, 1))
        assert counted.tolist() == [9, 4, 0, 3, NEVER]
        expected, noted, read = sums.double(), decay.double(), patches.double()
        for row in (0, 2):
            for layer in range(layers):
                weights = means[layer][row].double()
                by_span = weights @ table[row, :columns].double()
                parts = by_span @ sources[row].double()
                expected[row, layer] += by_span
                noted[row, POSITIONS[row], layer] = parts / parts.sum()
                read[row, layer, :columns] += weights
        close(summed, expected)
        close(shares, noted)
        close(by_column, read)
        for actual, before in ((summed, sums), (shares, decay), (by_column, patches)):
            assert torch.equal(actual[[1, 3, 4]], before[[1, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_residual_stream_is_counted_as_in_torch(loops: Loops, dtype: torch.dtype) -> None:
    """The loop agrees with `stream_looks`, which has its own tests; the third row requests only its states."""
    random = torch.Generator().manual_seed(0)
    rows, layers, width, gates = len(NEW), 3, 37, 21

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    lists = (
        [some(rows, 1, width) for _ in range(4 * layers)],
        [some(rows, 1, width) for _ in range(layers)],
        [some(rows, 1, gate_width) for gate_width in (gates, 0, gates - 2)],
        [some(rows, 1, gate_width).exp() for gate_width in (gates, 0, gates - 2)],
    )
    decoded = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])[:, None]
    counters = [torch.rand(rows, layers, 9), torch.rand(rows, layers, gates + 3), torch.rand(rows, 2, layers, width)]
    measured, states, activations = stream.stream_looks(*lists)
    for _, (counted, sums, neurons, totals) in both(
        loops, "count_stream", (*lists, POSITIONS, decoded, ACTIVE), [COUNTED, *counters]
    ):
        assert counted.tolist() == [9, 4, 0, 3, NEVER]
        expected = [tensor.double() for tensor in counters]
        expected[0][0] += measured[0]
        for row in (0, 2):
            expected[1][row, :, :gates] += activations[row]
            expected[2][row, 0] += states[row]
            expected[2][row, 1] = states[row]
        for actual, wanted_sums in zip((sums, neurons, totals), expected, strict=True):
            close(actual, wanted_sums)


def test_damping_is_counted_as_in_torch(loops: Loops) -> None:
    effects = [torch.rand(len(NEW), 1, 3) for _ in range(4)]
    before = torch.rand(len(NEW), 4, 2)
    for _, (counted, sums) in both(loops, "count_damping", (effects, POSITIONS, ACTIVE), [COUNTED, before]):
        assert counted.tolist() == [9, 4, 0, 3, NEVER]
        expected = before.clone()
        for row in (0, 2):
            expected[row] += torch.stack([effect[row, 0, 1:] for effect in effects])
        close(sums, expected)


def test_the_effect_of_see_is_recorded_as_in_torch(loops: Loops) -> None:
    effects = [torch.rand(len(NEW), 3) for _ in range(4)]
    before = torch.rand(len(NEW), 12, 4)
    for _, (steps,) in both(loops, "note_enhancement", (effects, POSITIONS), [before]):
        expected = before.clone()
        for row, position in enumerate(POSITIONS.tolist()):
            alpha, attention, after = torch.stack([effect[row] for effect in effects]).double().unbind(-1)
            expected[row, position] = torch.stack([alpha.mean(), alpha.max(), attention.mean(), after.mean()]).float()
        close(steps, expected)


def test_unsuitable_tensors_are_refused(loops: Loops) -> None:
    rows, at = 2, torch.tensor([3, 20])
    active, counted, means = torch.ones(rows, 1, 1), torch.zeros(rows, dtype=torch.int64), [torch.rand(rows, 20)]
    table, sources, sums = torch.ones(rows, 20, 4), torch.ones(rows, 4, 3), torch.zeros(rows, 1, 4)
    decay, patches = torch.zeros(rows, 30, 1, 3), torch.zeros(rows, 1, 30)
    effects, update = [torch.rand(rows, 1, 3)], torch.rand(rows, 1, 8)
    measured, neurons, totals = torch.zeros(rows, 1, 9), torch.zeros(rows, 1, 8), torch.zeros(rows, 2, 1, 8)
    streamed = [update] * 4, [update], [update], [update], at, active[..., 0], active, counted
    refused: list[tuple[Any, ...]] = [
        ("count_attention", means, table[:, :10], at, sources, active, counted, sums, decay, patches),
        ("count_attention", means, table, at, sources[:, :3], active, counted, sums, decay, patches),
        ("count_attention", means, table, at, sources, active, counted, sums[..., :3], decay, patches),
        ("count_attention", means, table, at, sources, active, counted, sums, decay[:, :20], patches),
        ("count_attention", means, table, at, sources, active, counted, sums, decay, patches[..., :15]),
        ("count_attention", means, table, at, sources, active, counted.float(), sums, decay, patches),
        ("count_attention", [means[0].double()], table, at, sources, active, counted, sums, decay, patches),
        ("count_attention", [means[0][:1]], table, at, sources, active, counted, sums, decay, patches),
        ("count_damping", effects, at, active, counted, torch.zeros(rows, 2, 2)),
        ("count_damping", effects, at, active[:1], counted, torch.zeros(rows, 1, 2)),
        ("note_enhancement", [torch.rand(rows, 3)], at, torch.zeros(rows, 20, 4)),
        ("note_enhancement", [torch.rand(rows, 3)], at, torch.zeros(1, 30, 4)),
        ("count_stream", *streamed, measured[..., :8], neurons, totals),
        ("count_stream", *streamed, measured, neurons[..., :7], totals),
        ("count_stream", *streamed, measured, neurons, totals[..., :7]),
    ]
    for name, *arguments in refused:
        with pytest.raises(RuntimeError, match="rejected"):
            loops(name, *arguments)
