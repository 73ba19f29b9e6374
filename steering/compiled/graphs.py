"""Decode steps as CUDA graphs: all kernels of a step are launched at once, where a host that launches one after the other
takes longer than a GPU computes.

A graph reads and writes the same memory whenever it is replayed, for as many rows and columns as it was captured for. So
each has inputs of its own, into which a step's are copied, and rows behind the running ones, which write to the last column
of their slots, where nothing is ever read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from steering.compiled.step import DecodeStep
from steering.compiled.tensors import Bound, Foreign, Mould, Pattern, taken_apart
from steering.decoder.kv import KVPool
from steering.loops.native import Loops
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, PrefillChunk

LEAST = 256
"""Columns that a graph reads at least."""
MOST = 256
"""Graphs that are kept: each holds what it gives, of a step with every readout a few MB a row."""
WARMUPS = 2
"""Runs before a capture, which make what is made at first use."""

log = logging.getLogger(__name__)

Captured = tuple[Callable[[], object], list[torch.Tensor]]
"""What runs again, and what it writes to each time."""


class Capture:
    """Makes CUDA graphs of calls. All have their intermediate results in the same memory: one runs at a time, and what it
    gives is read before another one runs."""

    def __init__(self) -> None:
        self._memory: Any = None

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
        """A call as a graph. Raises what torch raises for one that waits for the host."""
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # which a failure leaves
            if self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            beforehand(run, device)
            graph = torch.cuda.CUDAGraph()
            try:  # while other threads copy pictures
                with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                    made = run()
            except BaseException:
                self._memory = None  # torch takes it for one that is still captured in
                raise
        return graph.replay, made


def beforehand(run: Callable[[], object], device: torch.device) -> None:
    """Have a call make what it makes at first use, as those who capture it must."""
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARMUPS):
            run()
    torch.cuda.current_stream(device).wait_stream(aside)


class _Graph(NamedTuple):
    """fed: tokens, positions and rotary positions, (rows,). given: the hooks' tensors. made: hidden states, logits, and what
    hooks left behind. mould, changes: of the hooks."""

    fed: list[torch.Tensor]
    given: list[torch.Tensor]
    replay: Callable[[], object]
    made: list[torch.Tensor]
    mould: Mould
    changes: list[tuple[int, str, Any]]


class DecodeGraphs:
    """What a runner asks for its decode steps on a GPU, as `steps.CompiledSteps`. One is captured for each number of rows
    and columns, up to buckets, when it is first wanted, by what `captures` makes, which is forgotten with all its graphs.
    Where one cannot be captured once the engine was `tried`, steps for which there is none run as they are."""

    axes: int | None = None
    loops: Loops | None = None

    def __init__(
        self,
        mllm: MLLM,
        captures: Callable[[], Callable[[Callable[[], list[torch.Tensor]], torch.device], Captured]] = Capture,
    ):
        self._mllm, self._captures, self._capture = mllm, captures, captures()
        self.tried = False
        self._ended = False
        self._graphs: dict[tuple[int | None, int, int], list[_Graph]] = {}
        self.taken = 0
        """How many steps were run."""

    def __len__(self) -> int:
        return sum(map(len, list(self._graphs.values())))  # others count while steps are captured

    def columns(self, needed: int, pool: KVPool) -> int:
        """How many columns a step reads that needs so many: few numbers, each at most half as large again as the one
        before."""
        size = LEAST
        while size < needed:
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        return min(size, pool.length)

    def may_run(self, chunk: PrefillChunk, pool: KVPool) -> bool:
        """No prompt's: their sizes are too many."""
        return False

    def prefill(self, *args: object) -> Computed | None:
        """None."""
        return None

    def decode(
        self,
        hooks: Bound,
        axes: int | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
    ) -> Computed | None:
        """As `compiled.package.Package`; None for hooks that hold what cannot be copied, and before keys and values are
        made."""
        rows = len(tokens)
        if pool.layers < self._mllm.num_layers:
            return None
        full = min(1 << (rows - 1).bit_length(), pool.slots)
        where = axes, full, columns
        found = ((one, given) for one in self._graphs.get(where, ()) if (given := hooks.tensors(one.mould)) is not None)
        graph, given = next(found, (None, []))
        if graph is None:
            hooks.reset()
            try:
                shape, given = taken_apart(hooks.values)
            except Foreign:
                return None
            if any(one.shape[0] != rows for one in given):
                return None
            graph = self._new(where, partial(self._made, shape, *where, given, pool))
            if graph is None:
                return None
        graph.fed[1][rows:] = pool.length - 1
        graph.fed[2][rows:] = 0
        torch._foreach_copy_([one[:rows] for one in graph.fed], [tokens, positions, rope])
        if given:
            torch._foreach_copy_([one[:rows] for one in graph.given], given)
        graph.replay()
        self.taken += 1
        hidden, logits, *made = [one[:rows] for one in graph.made]
        graph.mould.change(hooks.values, graph.changes, [*given, *made])
        return Computed(hidden.clone(), logits.clone())  # which some keep until the next step

    def _new(self, where: tuple[int | None, int, int], capture: Callable[[], _Graph]) -> _Graph | None:
        """Capture a step, and keep it; None where that is over."""
        if self._ended:
            return None
        if len(self) >= MOST:
            self._graphs.clear()
            self._capture = self._captures()
        try:
            made = capture()
        except Exception as error:
            if not self.tried:
                raise
            log.warning("no more decode steps are captured; those that are not run as they are: %s", error)
            self._ended = True
            return None
        self._graphs.setdefault(where, []).append(made)
        return made

    def _made(
        self,
        shape: Pattern,
        axes: int | None,
        rows: int,
        columns: int,
        given: list[torch.Tensor],
        pool: KVPool,
    ) -> _Graph:
        """Capture a step."""
        device = self._mllm.device
        step = DecodeStep(self._mllm, shape, axes, None)
        fed = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        fed[1].fill_(pool.length - 1)  # what is run before the graph must write where nobody reads
        own = [one.new_zeros(rows, *one.shape[1:]) for one in given]
        column, pooled = torch.zeros(columns, device=device), list(pool.tensors)
        replay, made = self._capture(lambda: step(*fed, column, own, pooled), device)
        mould = Mould(shape, [(None, *one.shape[1:]) for one in given])
        return _Graph(fed, own, replay, made, mould, mould.changes(step.left))
