"""Captures of calls, on a device whose memory follows torch's rules for CUDA graphs; there is no GPU here.

The rules are those of `CUDAGraph::reset`, `create_or_incref_pool` and `getCurrentCUDABlasHandle` of torch 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steering.triton import capture
from steering.triton.capture import Capture

DEVICE = torch.device("cuda:0")
EAGER = "eager"
"""The memory of what no graph has."""


class Block:
    """Memory that was allocated. `used`: it is not free. `mapped`: the device still has it."""

    def __init__(self, pool: Any):
        self.pool, self.used, self.mapped = pool, True, True


class Graph:
    """A captured call, which writes to `blocks` at each replay."""

    def __init__(self, cuda: Cuda):
        self._cuda, self.blocks = cuda, list[Block]()
        self.pool: Any = None

    def replay(self) -> None:
        assert all(block.mapped for block in self.blocks), "an illegal memory access was encountered"

    def __del__(self) -> None:
        if self.pool is not None:
            self._cuda.drop_workspace()
            self._cuda.graphs[self.pool] -= 1


class Cuda:
    """Stands for `torch.cuda` and what belongs to it. graphs: their number, by memory."""

    def __init__(self) -> None:
        self.graphs: dict[Any, int] = {}
        self._blocks: list[Block] = []
        self._workspace: Block | None = None
        self._capturing: Graph | None = None
        self.current_device = lambda: 0
        self.graph_pool_handle = lambda: (0, len(self.graphs) + 1)
        self.CUDAGraph = lambda: Graph(self)
        self.current_stream = self.Stream = lambda device: SimpleNamespace(
            device=device, wait_stream=lambda other: None
        )
        self.device = self.stream = lambda entered: nullcontext()

    def product(self) -> Block:
        """Multiply, for which torch makes a workspace that it keeps for the stream; return its result's memory."""
        if self._workspace is None:
            self._workspace = self._allocated()
        if self._capturing is not None:
            self._capturing.blocks.append(self._workspace)
        return self._allocated()

    def drop_workspace(self) -> None:
        if self._workspace is not None:
            self._workspace.used, self._workspace = False, None

    @contextmanager
    def graph(self, graph: Graph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        for block in self._blocks:  # as torch.cuda.graph empties caches
            owned = self.graphs.get(block.pool, 0)
            block.mapped = block.mapped and (block.used or bool(owned))
        if not any(block.used for block in self._blocks if block.pool == pool) and not self.graphs.get(pool):
            self.graphs[pool] = 0
        elif not self.graphs[pool]:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.graphs[pool] += 1
        graph.pool = pool
        self._capturing = graph
        try:
            yield
        finally:
            self._capturing = None

    def _allocated(self) -> Block:
        block = Block(EAGER if self._capturing is None else self._capturing.pool)
        self._blocks.append(block)
        return block


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    ended = dict.fromkeys(("_cuda_endAllocateToPool", "_cuda_releasePool"), lambda device, pool: None)
    below = SimpleNamespace(_cuda_clearCublasWorkspaces=cuda.drop_workspace, **ended)
    monkeypatch.setattr(capture, "torch", SimpleNamespace(cuda=cuda, _C=below))
    return cuda


def test_a_graph_runs_on_when_another_one_of_its_stream_is_dropped(cuda: Cuda) -> None:
    captured: Any = Capture()
    graphs = [captured(lambda: [cuda.product()], DEVICE) for _ in range(3)]
    del graphs[1]
    graphs.append(captured(lambda: [cuda.product()], DEVICE))
    del graphs[0]
    captured(lambda: [cuda.product()], DEVICE)
    for replay, _ in graphs:
        replay()


def test_a_graph_can_be_captured_when_all_are_dropped_whose_results_are_still_held(cuda: Cuda) -> None:
    captured: Any = Capture()
    outputs = [captured(lambda: [cuda.product()], DEVICE)[1] for _ in range(3)]
    assert all(block.mapped for (block,) in outputs)
    assert len({block.pool for (block,) in outputs}) == 3


def test_graphs_share_memory_until_a_capture_fails(cuda: Cuda) -> None:
    captured: Any = Capture()
    graphs = [captured(lambda: [cuda.product()], DEVICE) for _ in range(2)]
    calls = []

    def fails_in_the_capture() -> list[Block]:
        calls.append(cuda.product())
        if len(calls) > capture.WARMUPS:
            raise RuntimeError("operation not permitted when stream is capturing")
        return calls

    with pytest.raises(RuntimeError, match="not permitted"):
        captured(fails_in_the_capture, DEVICE)
    graphs.append(captured(lambda: [cuda.product()], DEVICE))
    first, second, third = (block.pool for _, (block,) in graphs)
    assert first == second != third
    for replay, _ in graphs:
        replay()
