"""Prompts as CUDA graphs, because launching the kernels of a short one takes the host longer than the GPU computes.

Prompts are packed one behind the other and padded to one of a few numbers of tokens. Padding writes to the last column of a
slot, where nothing is ever read. Prompts under hooks have graphs only alone, because hooks know a row for each prompt. So
have those of models with recurrent states, which are of a row.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from steering.accel.agreement import agree
from steering.accel.backend import Eager, Ran
from steering.accel.prompt_step import PackedPromptStep, Unsupported, places_of
from steering.accel.step import SCORES, CapturedPass
from steering.accel.tensors import Bound, Foreign, Pattern, TreeSpec, taken_apart
from steering.accel.traced import TRACED, bound_of
from steering.decoder.kv import KVPool
from steering.devices import leaves_room, to_device
from steering.model.embedded import Embedded
from steering.model.mllm import MLLM
from steering.protocol.slots import Computed, PrefillChunk, Slots
from steering.recorders.attention import GPU_CAPTURE_ROWS
from steering.recurrent.padded import divided_at
from steering.triton.capture import CaptureFunction

SIZES = (*range(32, 257, 32), *range(320, 513, 64), *range(640, 1025, 128))
"""The numbers of tokens that graphs have; with more, a GPU takes longer than the host."""
FIRST = (64, 256, 512)
"""The numbers of tokens whose graphs are captured at start."""
ROWS = 16
"""Maximum number of prompts of a graph."""
SMALL = 128
"""Tokens up to which a pass takes as long as reading the weights, so that padding costs nothing."""
MOST_HOOKED = 24
"""Maximum number of graphs under hooks, which depend on what clients choose."""
MOST_WANTED = 64
"""Maximum number of forms under hooks that have no graph: the latest are kept."""
STALE = 512
"""Passes after which a graph under hooks that was not used gives way to another."""
FEW = 4
"""Maximum number of prompts under hooks that run one after the other: an eager pass of all takes as long as these."""
PATIENCE = 8
"""Passes without a graph before running answers wait for its capture, which takes about as long as these lose."""
MOST_TOKENS = GPU_CAPTURE_ROWS
"""Maximum number of tokens under hooks: readouts reduce those of longer prompts in parts of any size."""
MOST_SCORES = 2**19
"""Maximum product of tokens and columns under hooks, which may read the weights of all heads."""

log = logging.getLogger(__name__)


class _Inputs(NamedTuple):
    """The inputs of a pass beside embeddings.

    axes: of rotary positions, None for positions without an axis. overlay: the names of its arguments, and layers: how many
    layers have features.
    """

    axes: int | None
    overlay: tuple[str, ...] = ()
    layers: int = 0

    @classmethod
    def of(cls, embedded: Embedded, axes: int | None) -> _Inputs | None:
        """Return the inputs of prompts in a model with so many axes; None where they cannot be padded."""
        axes = embedded.positions.shape[0] if embedded.positions.ndim == 3 else axes
        if not embedded.divisible or embedded.by_token:
            return None
        if (overlay := embedded.overlay) is None:
            return cls(axes)
        names = (overlay.name, *overlay.features)
        return cls(axes, names, *map(len, overlay.features.values())) if len(names) == 2 else None


class _Kind(NamedTuple):
    """The kind of a chunk: it has several prompts, goes on behind earlier tokens, or wants states before its end."""

    several: bool
    goes_on: bool
    wants: bool

    @classmethod
    def of(cls, chunk: PrefillChunk) -> _Kind:
        """Return the kind of a chunk."""
        # The states behind a chunk are compared in any case.
        wants = any(token < length for row, length in zip(chunk.wanted, chunk.lengths, strict=True) for token in row)
        return cls(len(chunk.sequences) > 1, any(chunk.starts), wants)


@dataclass
class _Form:
    """Passes of one number of tokens under hooks of one shape.

    inputs: beside embeddings. names: of the slots that have hooks. columns: the number that hooks read, 0 without hooks.
    tensors: for each tensor of the hooks, its shape, dtype and device. wanted: how often it was wanted. used: the pass in
    which it was wanted last. agreed: the kinds of chunks for which its results were compared with eager ones.
    refused: it has no graph.
    """

    tokens: int
    inputs: _Inputs
    names: tuple[str, ...]
    columns: int
    pattern: Pattern
    tree_spec: TreeSpec
    tensors: list[tuple[torch.Size, torch.dtype, torch.device]]
    graph: CapturedPass | None = None
    wanted: int = 0
    used: int = 0
    agreed: set[_Kind] = field(default_factory=set)
    refused: bool = False


class PromptGraphs:
    """The graphs of one model's prompts; `taken` is how many passes ran in one.

    A graph is captured while nothing runs (`prepare_next`), or once it was wanted `PATIENCE` times, and used if its first
    results are the eager ones. After a capture that fails there are no more.
    """

    def __init__(self, mllm: MLLM, capture: CaptureFunction):
        self._mllm, self._capture = mllm, capture
        self._forms: list[_Form] = []
        self._pool: KVPool | None = None
        self._ended = False
        self._passes = 0
        self.taken = 0

    def __len__(self) -> int:
        return sum(form.graph is not None for form in list(self._forms))

    def run(
        self,
        chunk: PrefillChunk,
        acting: Sequence[Slots],
        inputs: Embedded,
        axes: int | None,
        pool: KVPool,
        eager: Eager,
    ) -> Ran | None:
        """Run a chunk of some prompts, with these decoder inputs; None where it must run eagerly.

        acting: all slots that take part in the pass. eager: runs the chunk eagerly under hooks, for the first comparison.
        """
        size, kind = _size(sum(chunk.lengths)), _Inputs.of(inputs, axes)
        wanting = [part for part in acting if part.may_hook(chunk)]
        most = 1 if wanting or self._mllm.recurrent_layers else ROWS
        supported = len(chunk.sequences) <= most and all(type(part) in TRACED for part in wanting)
        fits = 0 < size <= (MOST_TOKENS if wanting else SIZES[-1]) and chunk.columns < pool.length
        held = pool.layers == len(self._mllm.attention_layers) and _leaves_wanted(chunk)
        if self._ended or kind is None or not supported or not fits or not held:
            return None
        self._pool = pool
        self._passes += 1
        names = tuple(part.name for part in wanting)
        size = self._captured_size(size, kind, names)
        columns = pool.rounded(chunk.starts[0] + size) if wanting else 0
        if columns * size > MOST_SCORES:
            return None
        hooks = {part.name: part.prefill(replace(chunk, padded=size)) for part in wanting}
        bound = bound_of(hooks)
        match = self._match_form(bound, size, kind, names, columns)
        if match is None:
            return None
        form, tensors = match
        form.wanted, form.used = form.wanted + 1, self._passes
        graph = form.graph or (self._new(form, pool) if form.wanted > PATIENCE else None)
        if graph is None:
            return None
        self._feed(graph, chunk, inputs, pool.length - 1)
        if tensors:
            torch._foreach_copy_(graph.given, tensors)
        graph.replay()
        self.taken += 1
        hidden, *new_tensors = [tensor.clone() for tensor in graph.made]  # callers keep them
        form.tree_spec.change(bound.values, graph.changes, [*tensors, *new_tensors])
        ran = Ran(hooks, self._computed(chunk, hidden))
        _keep_states(chunk, pool)
        known = _Kind.of(chunk) in form.agreed
        return ran if known else self._compared(form, graph, ran, chunk, wanting, inputs, pool, eager)

    def apart(self, chunk: PrefillChunk, acting: Sequence[Slots]) -> bool:
        """Return True where a few prompts probably have a graph each, and none together, so that none has to run eagerly."""
        hooked = any(part.may_hook(chunk) for part in acting)
        if not 1 < len(chunk.sequences) <= FEW or not (hooked or self._mllm.recurrent_layers):
            return False
        captured = {form.tokens for form in self._forms if bool(form.names) is hooked and form.graph is not None}
        return all(_size(length) in captured for length in chunk.lengths)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the first graphs of prompts without hooks."""
        for size in FIRST:
            self._prepare(size)

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Capture one wanted graph, or a further one of prompts without hooks; return False without one."""
        if self._pool is None or self._ended:
            return False
        for form in self._forms:
            wanted = form.wanted > (1 if form.names else 0)
            if wanted and form.graph is None and not form.refused and self._new(form, self._pool) is not None:
                return True
        return any(self._prepare(size) for size in SIZES)

    def _prepare(self, size: int) -> bool:
        """Capture the graph of prompts without hooks that have so many tokens; return False where there is one."""
        plain = [form for form in self._forms if not form.names]
        known = {form.inputs for form in plain if form.tokens == size and (form.graph or form.refused)}
        kinds = {form.inputs for form in plain} - known
        if self._pool is None or not kinds:
            return False
        match = self._match_form(Bound([]), size, kinds.pop(), (), 0)
        return match is not None and self._new(match[0], self._pool) is not None

    def _captured_size(self, size: int, kind: _Inputs, names: tuple[str, ...]) -> int:
        """Return the number of tokens of the smallest graph that probably suits `size`; `size` where none does."""
        most = max(SMALL, size + size // 4)
        captured = [form.tokens for form in self._forms if (form.inputs, form.names) == (kind, names) and form.graph]
        return min((tokens for tokens in captured if size <= tokens <= most), default=size)

    def _match_form(
        self, hooks: Bound, size: int, kind: _Inputs, names: tuple[str, ...], columns: int
    ) -> tuple[_Form, list[torch.Tensor]] | None:
        """Return the form of passes with these hooks, and their tensors.

        None where it is refused, or they cannot be copied.
        """
        for form in self._forms:
            alike = (form.tokens, form.inputs, form.names, form.columns) == (size, kind, names, columns)
            if alike and (tensors := form.tree_spec.tensors(hooks.values)) is not None:
                return None if form.refused else (form, tensors)
        try:
            pattern, tensors = taken_apart(hooks.values)
        except Foreign:
            return None
        tree_spec = TreeSpec(pattern, [tuple(tensor.shape) for tensor in tensors])
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        form = _Form(size, kind, names, columns, pattern, tree_spec, kinds, used=self._passes)
        wanted = [form for form in self._forms if form.names and form.graph is None]
        if names and len(wanted) >= MOST_WANTED:
            self._forms.remove(min(wanted, key=lambda form: form.used))
        self._forms.append(form)
        return form, tensors

    def _has_room(self, form: _Form) -> bool:
        """Return True where there may be a graph of a form, after one that was not used for long has given way."""
        hooked = [form for form in self._forms if form.names and form.graph is not None]
        if not form.names or len(hooked) < MOST_HOOKED:
            return True
        oldest = min(hooked, key=lambda form: form.used)
        if self._passes - oldest.used < STALE:
            return False
        self._forms.remove(oldest)
        return True

    def _new(self, form: _Form, pool: KVPool) -> CapturedPass | None:
        """Capture a pass, and keep it; return None where capturing has ended, or memory is short."""
        needed = SCORES * self._mllm.text_config.num_attention_heads * form.tokens * form.columns
        if self._ended or not leaves_room(self._mllm.device, needed) or not self._has_room(form):
            return None
        try:
            form.graph = self._capture_pass(form, pool)
        except torch.OutOfMemoryError as error:
            log.warning("prompts of %d tokens run eagerly: %s", form.tokens, error)
            form.refused = True
        except Unsupported as error:  # as in float32
            log.info("prompts run eagerly: %s", error)
            self._ended = True
        except Exception as error:
            log.warning("no more prompts are captured; the rest run eagerly: %s", error)
            self._ended = True
        else:
            log.info("captured prompts of %d tokens: %d graphs", form.tokens, len(self))
        return form.graph

    def _capture_pass(self, form: _Form, pool: KVPool) -> CapturedPass:
        """Capture a pass."""
        mllm, device, (axes, overlay, layers) = self._mllm, self._mllm.device, form.inputs
        step = PackedPromptStep(mllm, form.pattern, axes, form.columns, overlay)
        embeds = torch.zeros(1, form.tokens, mllm.hidden_size, dtype=mllm.dtype, device=device)
        positions = torch.zeros(*(() if axes is None else (axes,)), 1, form.tokens, dtype=torch.int64, device=device)
        # Runs before the capture must write where nothing reads: all tokens are padding.
        nothing = places_of(form.tokens, [0], [0], [0], ROWS, pool.length - 1)
        fed = [embeds, positions, to_device(nothing, device), *(torch.zeros_like(embeds) for _ in range(layers))]
        given = [torch.zeros(shape, dtype=dtype, device=place) for shape, dtype, place in form.tensors]
        cached = list(pool.tensors)
        replay, made = self._capture(lambda: step(*fed[:3], fed[3:], given, cached), device)
        return CapturedPass(fed, given, replay, made, form.tree_spec.changes(step.left))

    def _feed(self, graph: CapturedPass, chunk: PrefillChunk, inputs: Embedded, spare: int) -> None:
        """Copy the inputs of a chunk into a graph's, whose padding writes to the column `spare`."""
        embeds, positions, places, *features = graph.fed
        tokens = sum(chunk.lengths)
        slots = range(chunk.rows.start, chunk.rows.stop)
        places.copy_(
            to_device(places_of(embeds.shape[1], slots, chunk.starts, chunk.lengths, ROWS, spare), places.device)
        )
        new_embeds, new_positions = inputs.embeds.flatten(0, 1), inputs.positions.flatten(-2)
        real = (chunk.real > 0).flatten()
        if len(chunk.sequences) > 1:
            index = to_device(real.nonzero()[:, 0], places.device)
            new_embeds, new_positions = new_embeds[index], new_positions[..., index]
        embeds[0, :tokens], embeds[0, tokens:] = new_embeds, 0  # padding must stay finite
        positions[..., 0, :tokens] = new_positions
        if inputs.overlay is not None:
            marked = to_device(inputs.overlay.marked.flatten()[real].nonzero()[:, 0], places.device)
            for buffer, part in zip(features, *inputs.overlay.features.values(), strict=True):
                buffer.zero_()
                buffer[0, marked] = part

    def _computed(self, chunk: PrefillChunk, packed: torch.Tensor) -> Computed:
        """Return the results of a chunk from the states (1, n, d) of its packed tokens."""
        hidden = packed[:, : chunk.width]
        if len(chunk.sequences) > 1:
            begins = torch.tensor([0, *itertools.accumulate(chunk.lengths[:-1])])
            index = begins[:, None] + torch.arange(chunk.width)
            hidden = packed[0, to_device(index.clamp(max=packed.shape[1] - 1), packed.device)]
        return Computed(hidden, self._mllm.head_at(hidden, chunk.last) if chunk.complete else None)

    def _compared(
        self,
        form: _Form,
        graph: CapturedPass,
        ran: Ran,
        chunk: PrefillChunk,
        wanting: Sequence[Slots],
        inputs: Embedded,
        pool: KVPool,
        eager: Eager,
    ) -> Ran:
        """Return the results of a graph if they are the eager ones, from then on; otherwise the eager results."""
        hooks, states = {part.name: part.prefill(chunk) for part in wanting}, _states_behind(chunk, pool)
        expected = Ran(hooks, eager(hooks, chunk, inputs))
        alike = agree(ran, expected, chunk, graph.changes, (states, _states_behind(chunk, pool)))
        if alike:
            form.agreed.add(_Kind.of(chunk))
            return ran
        if alike is False:
            log.warning(
                "the graph of prompts of %d tokens has other results than the eager pass, and is not used", form.tokens
            )
            form.refused, form.graph = True, None
        return expected


def _leaves_wanted(chunk: PrefillChunk) -> bool:
    """Return True where a graph's pass of a chunk leaves all snapshots of recurrent states that are wanted."""
    wanted = {token for row in chunk.wanted for token in row}
    return not wanted or wanted <= {divided_at(chunk.starts[0], chunk.lengths[0]), chunk.lengths[0]}


def _keep_states(chunk: PrefillChunk, pool: KVPool) -> None:
    """Keep the wanted snapshots of recurrent states behind a graph's pass of a chunk."""
    start, length = chunk.starts[0], chunk.lengths[0]
    for token in chunk.wanted[0]:
        left = pool.states.taken(chunk.rows.start, start + length) if token == length else pool.states.left()
        chunk.sequences[0].prefill.states[start + token] = left


def _states_behind(chunk: PrefillChunk, pool: KVPool) -> list[torch.Tensor]:
    """Return the recurrent states that a pass of a chunk has left."""
    if not pool.states:
        return []
    kept = [pool.states.taken(chunk.rows.start, chunk.starts[0] + chunk.lengths[0])]
    kept += (chunk.sequences[0].prefill.states[chunk.starts[0] + token] for row in chunk.wanted for token in row)
    return [state for snapshot in kept for states in snapshot.values() for state in states]


def _size(tokens: int) -> int:
    """Return the number of tokens of a graph for so many; 0 where they are too many."""
    return next((size for size in SIZES if size >= tokens), 0)
