"""Decode steps as CUDA graphs, because launching their kernels one by one takes the host longer than the GPU computes.

A graph reads and writes the same memory at each replay, for the number of rows of its capture. So each has its own inputs,
into which a step's are copied, and padding rows after the running ones, which write to the last column of their slots, where
nothing is ever read.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from steering.accel.backend import Ran, RunnerState
from steering.accel.kernel import suits_kernel
from steering.accel.picture_graphs import PictureGraphs
from steering.accel.prompt_graphs import PromptGraphs
from steering.accel.step import SCORES, CapturedPass, DecodeStep
from steering.accel.tensors import Bound, Foreign, Pattern, TreeSpec, taken_apart
from steering.accel.traced import KnownHooks, traced_of
from steering.decoder.kv import KVPool
from steering.devices import leaves_room
from steering.model.embedded import Embedded
from steering.model.images import Features
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Slots
from steering.triton.capture import Capture, CaptureFunction

MOST = 256
"""Maximum number of graphs: each holds its outputs, a few MB a row for a step with every readout."""
MOST_OCCASIONAL = 8
"""Maximum number of forms of steps that depend on what clients choose, as the layers of VISTA; the latest are kept."""
PATIENCE = 16
"""Steps without a graph before running answers wait for its capture, which takes about as long as these steps lose."""

log = logging.getLogger(__name__)


class _Form:
    """Steps that differ only in their number of rows, and their graphs by that number.

    axes: of rotary positions. columns: the number read. pattern: of the hooks. tensors: for each tensor in them, the shape
    of a row, the dtype and the device. wanted: how often each number of rows had no graph. usual: it is one of few.
    """

    def __init__(self, axes: int | None, columns: int, pattern: Pattern, tensors: list[torch.Tensor], usual: bool):
        self.axes, self.columns, self.pattern, self.usual = axes, columns, pattern, usual
        self.tree_spec = TreeSpec(pattern, [(None, *tensor.shape[1:]) for tensor in tensors])
        self.tensors = [(tensor.shape[1:], tensor.dtype, tensor.device) for tensor in tensors]
        self.graphs: dict[int, CapturedPass] = {}
        self.wanted: Counter[int] = Counter()


class DecodeGraphs:
    """The backend of decode steps on a GPU.

    Graphs are captured for 1, 2, 4 and so on rows, each for hooks of one pattern, by a `captures()`; where they are too
    many, all are dropped with it. With a kernel that reads each row's own length a graph serves any number of columns;
    without, and for hooks that it does not support, there is one for each bucket of columns. A step without a graph runs in
    a larger one, or eagerly, until it was wanted `PATIENCE` times, because running answers wait for a capture. Once the
    engine was `tried`, a capture that fails is the last, and steps without a graph run eagerly.
    """

    axes: int | None = None
    spare_column = True

    def __init__(
        self,
        mllm: MLLM,
        captures: Callable[[], CaptureFunction] = Capture,
    ):
        self._mllm, self._captures, self._capture = mllm, captures, captures()
        self.pictures = PictureGraphs(mllm, self._capture)
        self.prompts = PromptGraphs(mllm, self._capture)
        self.tried = False
        self._ended = False
        self._forms: dict[tuple[int | None, int], list[_Form]] = {}
        self._occasional: list[_Form] = []
        """Forms that are not usual, the latest first."""
        self._pool: KVPool | None = None
        self.taken = 0
        """The number of steps that were run."""

    def __len__(self) -> int:
        # Other threads may count while steps are captured.
        return sum(len(form.graphs) for form in (*self._all_forms(), *self._occasional))

    def columns(self, needed: int, pool: KVPool, suited: bool = True) -> int:
        """Return the number of columns that a step reads which needs `needed`.

        It is all columns where a kernel reads only each row's own, and the step's hooks are `suited` to it.
        """
        every = self._mllm.decode_attention is not None and suited
        return pool.length if every else pool.rounded(needed)

    def on(self, runner: RunnerState) -> GraphPasses:
        """Return the passes of one runner."""
        return GraphPasses(self, runner)

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures whose sizes recur; decline others."""
        return self.pictures.features(pictures)

    def decode(
        self,
        hooks: Bound,
        axes: int | None,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        columns: int,
        pool: KVPool,
        usual: bool = True,
    ) -> Computed | None:
        """Decode under bound hooks; None where that is not possible.

        That is for hooks that hold what cannot be copied, before keys and values are allocated, and where no graph is
        captured yet. usual: there are few such steps, whatever clients request.
        """
        rows = len(tokens)
        if pool.layers < len(self._mllm.attention_layers):
            return None
        self._pool = pool
        match = self._match_form(hooks, axes, rows, columns, usual)
        if match is None:
            return None
        form, tensors = match
        graph = self._graph(form, rows, pool)
        if graph is None:
            return None
        graph.fed[1][rows:] = pool.length - 1
        graph.fed[2][rows:] = 0
        torch._foreach_copy_([tensor[:rows] for tensor in graph.fed], [tokens, positions, rope])
        if tensors:
            torch._foreach_copy_([tensor[:rows] for tensor in graph.given], tensors)
        graph.replay()
        self.taken += 1
        hidden, logits, *new_tensors = [tensor[:rows] for tensor in graph.made]
        form.tree_spec.change(hooks.values, graph.changes, [*tensors, *new_tensors])
        return Computed(hidden.clone(), logits.clone())  # callers may keep them until the next step

    @torch.inference_mode()
    def prepare(self, sizes: Iterable[int]) -> None:
        """Capture graphs of prompts, and of these numbers of rows for all usual hooks so far, raising what these raise."""
        self.prompts.prepare()
        if self._pool is not None:
            for rows, form in itertools.product(sizes, self._all_forms()):
                self._new(form, _padded_rows(rows, self._pool), self._pool)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture one wanted graph, or one for more rows of a usual step that has run alone, or one of prompts.

        Returns False without one. Call it while nothing runs.
        """
        if self._pool is None or self._ended:
            return self.prompts.prepare_next()
        sizes = [1 << power for power in range(self._pool.slots.bit_length())]
        for form in self._all_forms():  # not of occasional ones, which would have the usual ones dropped
            for size in (*form.wanted, *(sizes if 1 in form.graphs else ())):
                rows = _padded_rows(size, self._pool)
                if rows not in form.graphs:
                    return self._new(form, rows, self._pool) is not None
        return self.prompts.prepare_next()

    def _all_forms(self) -> list[_Form]:
        return [form for forms in list(self._forms.values()) for form in forms]

    def _forms_like(self, axes: int | None, columns: int, usual: bool) -> list[_Form]:
        """Return the list in which forms of such steps are kept."""
        return self._forms.setdefault((axes, columns), []) if usual else self._occasional

    def _match_form(
        self, hooks: Bound, axes: int | None, rows: int, columns: int, usual: bool
    ) -> tuple[_Form, list[torch.Tensor]] | None:
        """Return the form of graphs for these hooks, and their tensors; None where they cannot be copied."""
        forms = self._forms_like(axes, columns, usual)
        for form in forms:
            alike = (form.axes, form.columns) == (axes, columns)
            if alike and (tensors := hooks.tensors(form.tree_spec)) is not None:
                if not usual:
                    forms.remove(form)
                    forms.insert(0, form)
                return form, tensors
        hooks.reset()
        try:
            pattern, tensors = taken_apart(hooks.values)
        except Foreign:
            return None
        if any(tensor.shape[0] != rows for tensor in tensors):
            return None
        form = _Form(axes, columns, pattern, tensors, usual)
        if usual and len(forms) >= MOST:
            forms.clear()
        forms.insert(0, form)
        if not usual:
            del forms[MOST_OCCASIONAL:]
        return form, tensors

    def _graph(self, form: _Form, rows: int, pool: KVPool) -> CapturedPass | None:
        """Return the graph for a step of so many rows; None where it must run eagerly."""
        full = _padded_rows(rows, pool)
        if full in form.graphs:
            return form.graphs[full]
        form.wanted[full] += 1
        if (not self.tried or form.wanted[full] > PATIENCE) and (graph := self._new(form, full, pool)):
            return graph
        larger = [size for size in form.graphs if size >= rows]
        return form.graphs[min(larger)] if larger else None

    def _new(self, form: _Form, rows: int, pool: KVPool) -> CapturedPass | None:
        """Capture a step, and keep it; return None where capturing has ended, or memory is short."""
        if rows in form.graphs:
            return form.graphs[rows]
        heads = self._mllm.text_config.num_attention_heads
        needed = 0 if form.usual else SCORES * rows * heads * form.columns
        if self._ended or (self.tried and not leaves_room(self._mllm.device, needed)):
            return None
        if len(self) >= MOST:
            for dropped in (*self._all_forms(), *self._occasional):
                dropped.graphs.clear()
            self._forms, self._occasional = {}, []
            self._forms_like(form.axes, form.columns, form.usual).append(form)
            self._capture = self._captures()
        began = time.monotonic()
        try:
            graph = self._capture_step(form, rows, pool)
        except Exception as error:
            if not self.tried:
                raise
            log.warning("no more decode steps are captured; the rest run eagerly: %s", error)
            self._ended = True
            return None
        form.graphs[rows] = graph
        form.wanted.pop(rows, None)
        size = sum(tensor.nbytes for tensor in (*graph.fed, *graph.given, *graph.made)) / 2**20
        took, graphs = time.monotonic() - began, len(self)
        log.info(
            "captured a decode step of %d rows in %.2f s: %d graphs, its tensors %.0f MiB", rows, took, graphs, size
        )
        return graph

    def _capture_step(self, form: _Form, rows: int, pool: KVPool) -> CapturedPass:
        """Capture a step."""
        device = self._mllm.device
        step = DecodeStep(self._mllm, form.pattern, form.axes)
        fed = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        fed[1].fill_(pool.length - 1)  # runs before the capture must write where nothing reads
        inputs = [torch.zeros(rows, *shape, dtype=dtype, device=place) for shape, dtype, place in form.tensors]
        column, pooled = torch.zeros(form.columns, device=device), list(pool.tensors)
        replay, outputs = self._capture(lambda: step(*fed, column, inputs, pooled), device)
        return CapturedPass(fed, inputs, replay, outputs, form.tree_spec.changes(step.left))


def _padded_rows(rows: int, pool: KVPool) -> int:
    """Return the number of rows of the graph that runs `rows` rows."""
    return min(1 << (rows - 1).bit_length(), pool.slots)


class GraphPasses:
    """The passes of one runner as graphs.

    A graph has the hooks of the acting slots, and no others: even a no-op hook costs a kernel launch.
    """

    def __init__(self, graphs: DecodeGraphs, runner: RunnerState):
        self._graphs, self._pool, self._eager = graphs, runner.pool, runner.eager
        self._hooks = KnownHooks()

    def decode(
        self, batch: DecodeBatch, acting: Sequence[Slots], tokens: torch.Tensor, rope: torch.Tensor, axes: int | None
    ) -> Ran | None:
        """Decode; None where a hook cannot be captured, and where there is no graph."""
        traced = traced_of(acting)
        if traced is None:
            return None
        names, lasting = [part.name for part in traced], all(part.lasting for part in traced)
        hooks, bound = self._hooks.of(batch, names, lambda: {part.name: part.decode(batch) for part in traced}, lasting)
        suited = suits_kernel(bound.values)
        columns = self._graphs.columns(batch.columns, self._pool, suited)
        place = (tokens, batch.positions, rope, columns, self._pool)
        computed = self._graphs.decode(bound, axes, *place, usual=lasting and suited)
        return None if computed is None else Ran(hooks, computed)

    def apart(self, chunk: PrefillChunk, acting: Sequence[Slots]) -> bool:
        """Return True for a few prompts under hooks, if there are graphs for each."""
        return self._graphs.prompts.apart(chunk, acting)

    def prompts(self, chunk: PrefillChunk, acting: Sequence[Slots], inputs: Embedded, axes: int | None) -> Ran | None:
        """Run a chunk of some prompts; None for long ones, and where there is no graph."""
        return self._graphs.prompts.run(chunk, acting, inputs, axes, self._pool, self._eager)

    def prompt_kernel(self) -> None:
        """Return None: there is no such kernel."""
