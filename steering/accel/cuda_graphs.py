"""Decode steps as CUDA graphs: all kernels of a step are launched at once, where a host that launches one after the other
takes longer than a GPU computes.

A graph reads and writes the same memory whenever it is replayed, for as many rows as it was captured for. So each has inputs
of its own, into which a step's are copied, and rows behind the running ones, which write to the last column of their slots,
where nothing is ever read.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steering.accel.backend import Ran, RunnerState
from steering.accel.step import DecodeStep
from steering.accel.tensors import Bound, Foreign, Mould, Pattern, taken_apart
from steering.accel.traced import KnownHooks, traced_of
from steering.decoder.kv import KVPool
from steering.model.embedded import Embedded
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots

LEAST = 256
"""Columns that a graph reads at least."""
MOST = 256
"""Graphs that are kept: each holds what it gives, of a step with every readout a few MB a row."""
PATIENCE = 16
"""Steps that run without their graph before answers wait for its capture: it takes about as long as they lose."""
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
    hooks left behind. changes: of the hooks."""

    fed: list[torch.Tensor]
    given: list[torch.Tensor]
    replay: Callable[[], object]
    made: list[torch.Tensor]
    changes: list[tuple[int, str, Any]]


class _Form:
    """Steps that differ in their number of rows alone, and their graphs by that number. axes: of rotary positions. columns:
    that are read. pattern: of the hooks. tensors: of each that these hold the shape of a row, the dtype and the device.
    wanted: how often a number of rows had no graph."""

    def __init__(self, axes: int | None, columns: int, pattern: Pattern, given: list[torch.Tensor]):
        self.axes, self.columns, self.pattern = axes, columns, pattern
        self.mould = Mould(pattern, [(None, *one.shape[1:]) for one in given])
        self.tensors = [(one.shape[1:], one.dtype, one.device) for one in given]
        self.graphs: dict[int, _Graph] = {}
        self.wanted: Counter[int] = Counter()


class DecodeGraphs:
    """The backend of decode steps on a GPU.

    Graphs are captured for 1, 2, 4 and so on rows, each for hooks of one pattern, by what `captures` makes; where they are
    too many, all are dropped with it. With a kernel that reads each row's own length a graph serves any number of columns;
    without, there is one for each bucket of columns. A step for which there is no graph runs in a larger one, or eagerly,
    until it was wanted `PATIENCE` times, as running answers wait for a capture. Once the engine was `tried`, a capture that
    fails is the last, and steps without a graph run eagerly.
    """

    axes: int | None = None
    spare_column = True

    def __init__(
        self,
        mllm: MLLM,
        captures: Callable[[], Callable[[Callable[[], list[torch.Tensor]], torch.device], Captured]] = Capture,
    ):
        self._mllm, self._captures, self._capture = mllm, captures, captures()
        self.tried = False
        self._ended = False
        self._forms: dict[tuple[int | None, int], list[_Form]] = {}
        self._pool: KVPool | None = None
        self.taken = 0
        """How many steps were run."""

    def __len__(self) -> int:
        return sum(len(form.graphs) for form in self._every())  # others count while steps are captured

    def columns(self, needed: int, pool: KVPool) -> int:
        """How many columns a step reads that needs so many: all, where a kernel reads of each row what that has; else few
        numbers, each at most half as large again as the one before."""
        if self._mllm.decode_attention is not None:
            return pool.length
        size = LEAST
        while size < needed:
            size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        return min(size, pool.length)

    def on(self, runner: RunnerState) -> GraphPasses:
        """Return the passes of one runner."""
        return GraphPasses(self, runner)

    def features(self, pictures: Mapping[str, torch.Tensor]) -> None:
        """None: sizes of pictures are too many."""

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
        """A decode under bound hooks; None for hooks that hold what cannot be copied, before keys and values are made, and
        where no graph is captured yet."""
        rows = len(tokens)
        if pool.layers < self._mllm.num_layers:
            return None
        self._pool = pool
        known = self._known(hooks, axes, rows, columns)
        if known is None:
            return None
        form, given = known
        graph = self._graph(form, rows, pool)
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
        form.mould.change(hooks.values, graph.changes, [*given, *made])
        return Computed(hidden.clone(), logits.clone())  # which some keep until the next step

    @torch.inference_mode()
    def prepare(self, sizes: Iterable[int]) -> None:
        """Capture graphs of so many rows for all hooks that steps had so far. Raises what a capture raises."""
        if self._pool is not None:
            for rows, form in itertools.product(sizes, self._every()):
                self._new(form, _full(rows, self._pool), self._pool)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture one graph that was wanted, or of a number of rows that steps which run alone have none for; False where
        there is none. To be called while nothing runs."""
        if self._pool is None or self._ended:
            return False
        sizes = [1 << power for power in range(self._pool.slots.bit_length())]
        for form in self._every():
            for size in (*form.wanted, *(sizes if 1 in form.graphs else ())):
                rows = _full(size, self._pool)
                if rows not in form.graphs:
                    return self._new(form, rows, self._pool) is not None
        return False

    def _every(self) -> list[_Form]:
        return [form for forms in list(self._forms.values()) for form in forms]

    def _known(
        self, hooks: Bound, axes: int | None, rows: int, columns: int
    ) -> tuple[_Form, list[torch.Tensor]] | None:
        """Return what a graph for these hooks is captured for, and their tensors; None where they cannot be copied."""
        forms = self._forms.setdefault((axes, columns), [])
        for form in forms:
            if (given := hooks.tensors(form.mould)) is not None:
                return form, given
        hooks.reset()
        try:
            pattern, given = taken_apart(hooks.values)
        except Foreign:
            return None
        if any(one.shape[0] != rows for one in given):
            return None
        if len(forms) >= MOST:
            forms.clear()
        forms.append(_Form(axes, columns, pattern, given))
        return forms[-1], given

    def _graph(self, form: _Form, rows: int, pool: KVPool) -> _Graph | None:
        """Return the graph for a step of so many rows; None where it is to run as it is."""
        full = _full(rows, pool)
        if full in form.graphs:
            return form.graphs[full]
        form.wanted[full] += 1
        if (not self.tried or form.wanted[full] > PATIENCE) and (graph := self._new(form, full, pool)):
            return graph
        larger = [size for size in form.graphs if size >= rows]
        return form.graphs[min(larger)] if larger else None

    def _new(self, form: _Form, rows: int, pool: KVPool) -> _Graph | None:
        """Capture a step, and keep it; None where that is over."""
        if rows in form.graphs:
            return form.graphs[rows]
        if self._ended:
            return None
        if len(self) >= MOST:
            for other in self._every():
                other.graphs.clear()
            self._forms = {(form.axes, form.columns): [form]}
            self._capture = self._captures()
        began = time.monotonic()
        try:
            graph = self._made(form, rows, pool)
        except Exception as error:
            if not self.tried:
                raise
            log.warning("no more decode steps are captured; those that are not run as they are: %s", error)
            self._ended = True
            return None
        form.graphs[rows] = graph
        form.wanted.pop(rows, None)
        size = sum(one.nbytes for one in (*graph.fed, *graph.given, *graph.made)) / 2**20
        took, graphs = time.monotonic() - began, len(self)
        log.info(
            "captured a decode step of %d rows in %.2f s: %d graphs, its tensors %.0f MiB", rows, took, graphs, size
        )
        return graph

    def _made(self, form: _Form, rows: int, pool: KVPool) -> _Graph:
        """Capture a step."""
        device = self._mllm.device
        step = DecodeStep(self._mllm, form.pattern, form.axes)
        fed = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        fed[1].fill_(pool.length - 1)  # what is run before the graph must write where nobody reads
        own = [torch.zeros(rows, *shape, dtype=dtype, device=place) for shape, dtype, place in form.tensors]
        column, pooled = torch.zeros(form.columns, device=device), list(pool.tensors)
        replay, made = self._capture(lambda: step(*fed, column, own, pooled), device)
        return _Graph(fed, own, replay, made, form.mould.changes(step.left))


def _full(rows: int, pool: KVPool) -> int:
    """Return the rows of the graph in which so many run."""
    return min(1 << (rows - 1).bit_length(), pool.slots)


class GraphPasses:
    """The passes of one runner as graphs. A graph has the hooks of what acts, and no others: even a neutral one costs a
    kernel launch."""

    def __init__(self, graphs: DecodeGraphs, runner: RunnerState):
        self._graphs, self._pool = graphs, runner.pool
        self._hooks = KnownHooks()

    def columns(self, needed: int) -> int:
        """How many columns a decode reads that needs so many."""
        return self._graphs.columns(needed, self._pool)

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """A decode; None where a hook cannot be captured, and where there is no graph."""
        traced = traced_of(acting)
        if traced is None:
            return None
        names = [one.name for one in traced]
        hooks, bound = self._hooks.of(batch, names, lambda: {one.name: one.decode(batch) for one in traced})
        computed = self._graphs.decode(bound, axes, tokens, batch.positions, rope, batch.columns, self._pool)
        return None if computed is None else Ran(hooks, computed)

    def prompts(
        self, chunk: PrefillChunk, concerned: Sequence[Slots], inputs: Embedded, axes: int | None
    ) -> Ran | None:
        """None: sizes of prompts are too many."""
        return None

    def prompt_kernel(self) -> None:
        """None."""
