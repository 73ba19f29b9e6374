"""Steering in every slot: prompt tokens are steered by their class, generated tokens all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.interventions.loop.until import COLUMNS, STRENGTH, followed, selected
from steering.interventions.steer import NAME, Steer, Steering
from steering.prompt.tokens import class_count, prompt_classes
from steering.protocol.sequence import Sequence as Row
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.recorders.counting import NEVER


def prompt_delta(steers: Sequence[Steer], count: int) -> dict[int, torch.Tensor]:
    """Return the sum of all vectors for each class of prompt tokens, (count, d) for each steered layer.

    Zeros where only generated tokens are touched.
    """
    out: dict[int, torch.Tensor] = {}
    for steer in steers:
        delta, classes = steer.delta, steer.chosen.classes(count)
        for layer in steer.touched_layers:
            row = out.setdefault(layer, torch.zeros(count, delta.shape[1]))
            row += classes[:, None] * delta[layer]
    return out


def generated_delta(steers: Sequence[Steer], layers: int, width: int) -> torch.Tensor:
    """Return the sum of all vectors for every generated token, (layers, d)."""
    return sum((steer.delta for steer in steers if steer.chosen.generated), torch.zeros(layers, width))


class SteerRows(LayerHook):
    """The addition to each token of a prefill.

    classes: (rows, n, classes) one-hot, zero on padding. layers: the steered layers. delta: (layers, rows, classes, d), at
    these layers. Once settled, `by_token` (rows, n, layers), of all layers, is 1 / |h| of each token, h as it is before the
    addition, 0 at layers that are not steered.
    """

    by_token: torch.Tensor

    def __init__(self, classes: torch.Tensor, layers: tuple[int, ...], delta: torch.Tensor):
        self._classes = classes
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._delta = delta
        self._inverse: list[torch.Tensor] = []

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        place = self._places.get(layer)
        if place is None:
            self._inverse.append(self._classes.new_zeros(self._classes.shape[:2]))
            return hidden
        norm = hidden.float().norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        self._inverse.append((1 / norm).to(self._classes.device))
        return hidden + (self._classes.to(hidden) @ self._delta[place].to(hidden))

    def settle(self, positions: torch.Tensor | None) -> None:
        self.by_token, self._inverse = torch.stack(self._inverse, -1), []


class SteerTokens(LayerHook):
    """The addition to each row's generated tokens.

    delta: (rows, layers, d), zero where a row is not steered, so that every batch costs the same work.
    """

    def __init__(self, delta: torch.Tensor):
        self._delta = delta

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        return hidden + self._delta[:, layer, None].to(hidden.device)


class SteerSlots(Slots):
    """The addition to the generated tokens of every slot.

    delta: (slots, layers, d) in the model's dtype, at the slot's present strength. Of slots whose strength follows a number
    (see `until`): unit (slots, layers, d) float32, the addition at strength 1; loop (slots, COLUMNS); course (slots, length,
    2), strength and number at each column; counted (slots,), the last column that the loop has followed.
    """

    always: ClassVar[bool] = True
    measured: ClassVar[tuple[str, ...]] = ("loop", "course")

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        mllm = pool.mllm
        shape = (pool.slots, pool.layers, mllm.hidden_size)
        self.delta = torch.zeros(shape, dtype=mllm.dtype, device=pool.device)
        self.unit = torch.zeros(shape, device=pool.device)
        self.loop = torch.zeros(pool.slots, COLUMNS, device=pool.device)
        self.course = torch.zeros(pool.slots, pool.length, 2, device=pool.device)
        self.counted = torch.full((pool.slots,), NEVER, device=pool.device)

    def holds(self, sequence: Row) -> bool:
        return bool(_steers(sequence))

    def place(self, sequence: Row) -> None:
        slot, looped = sequence.slot, _loop(sequence)
        delta = generated_delta(_steers(sequence), *self.delta.shape[1:])
        self.delta[slot] = to_device(delta, self.delta)
        fill_slot(self.counted, slot, NEVER if looped is None else -1)
        if looped is not None and looped.until is not None:
            start, toward = abs(looped.scale), looped.toward or ""
            self.unit[slot] = to_device(looped.unit, self.unit)
            self.loop[slot] = to_device(looped.until.loop(start, toward, looped.span), self.loop)
            self.course[slot] = torch.nan

    def prefill(self, chunk: PrefillChunk) -> SteerRows | SteerTokens | None:
        if chunk.replay:
            return SteerTokens(self.delta[chunk.rows])
        touched = {
            layer for sequence in chunk.sequences for steer in _steers(sequence) for layer in steer.touched_layers
        }
        return self.rows(chunk, tuple(sorted(touched))) if any(map(_steers, chunk.sequences)) else None

    def rows(self, chunk: PrefillChunk, layers: tuple[int, ...]) -> SteerRows:
        """Return the addition to a chunk's tokens in `layers`, the layers where any row is steered."""
        steered = [(row, sequence) for row, sequence in enumerate(chunk.sequences) if _steers(sequence)]
        steers = [steer for _, sequence in steered for steer in _steers(sequence)]
        count = class_count(
            [steer.chosen for steer in steers],
            max((len(sequence.prompt.layout.images) for _, sequence in steered), default=0),
        )
        classes = torch.zeros(len(chunk.sequences), chunk.width, count)
        delta = torch.zeros(len(layers), len(chunk.sequences), count, self.delta.shape[2])
        for row, sequence in steered:
            start, length = chunk.starts[row], chunk.lengths[row]
            classes[row, :length] = prompt_classes(sequence.prompt.layout.spans[start : start + length], count)
            for layer, layer_delta in prompt_delta(_steers(sequence), count).items():
                delta[layers.index(layer), row] = layer_delta
        return SteerRows(to_device(classes, self.delta.device), layers, to_device(delta, self.delta))

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, SteerRows):
            return
        for row, sequence in enumerate(chunk.sequences):
            if _steers(sequence):
                sequence.captured.setdefault(NAME, []).append(hook.by_token[row, : chunk.lengths[row]])
        if chunk.complete and not chunk.replay:
            ends = torch.tensor([sequence.prompt.length - 1 for sequence in chunk.sequences])
            self._follow(chunk.sequences, chunk.rows.start, to_device(ends, self.loop.device), None, computed)

    def reuse(self, sequence: Row) -> Reuse:
        steers = _steers(sequence)
        key = tuple((steer.vector.digest, steer.scale, steer.touched_layers, steer.tokens) for steer in steers)
        return Reuse(sequence.prompt.length, key, measured=bool(steers))

    def by_row(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> torch.Tensor | None:
        return hook.by_token if isinstance(hook, SteerRows) else None

    def regain(self, sequence: Row, measured: torch.Tensor) -> None:
        sequence.captured[NAME] = [measured]

    def decode(self, batch: DecodeBatch) -> SteerTokens:
        return SteerTokens(self.delta[batch.rows])

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        self._follow(batch.sequences, 0, batch.positions, batch.active, computed)

    def _follow(
        self,
        sequences: Sequence[Row],
        first: int,
        columns: torch.Tensor,
        active: torch.Tensor | None,
        computed: Computed,
    ) -> None:
        """Move the strengths that follow a number, by what a pass measured at these columns (rows,).

        first: the slot of the first row. active: (rows, 1, 1), 0 for rows of a decode without effect; None in a prefill.
        """
        loops = [row for row, sequence in enumerate(sequences) if _loop(sequence) is not None]
        if not loops:
            return
        rows = to_device(torch.tensor(loops), self.loop.device)
        slots, at = rows + first, columns[rows]
        loop, measured = self.loop[slots], selected(computed.numbers, rows, self.loop[slots])
        new = at > self.counted[slots]
        if active is not None:
            new = new & (active[rows, 0, 0] > 0)
        moved = torch.where(new[:, None], followed(loop, measured), loop)
        passed = torch.stack([loop[:, STRENGTH], measured], 1)
        self.course[slots, at] = torch.where(new[:, None], passed, self.course[slots, at])
        self.counted[slots] = torch.where(new, at, self.counted[slots])
        self.loop[slots] = moved
        self.delta[slots] = (self.unit[slots] * moved[:, STRENGTH, None, None]).to(self.delta.dtype)

    def restore(self, sequence: Row, snapshot: Any) -> None:
        super().restore(sequence, snapshot)
        if _loop(sequence) is not None:
            slot = sequence.slot
            self.delta[slot] = (self.unit[slot] * self.loop[slot, STRENGTH]).to(self.delta.dtype)

    def take(self, sequence: Row) -> tuple[dict[int, torch.Tensor], int, torch.Tensor | None] | None:
        steers, layout = _steers(sequence), sequence.prompt.layout
        if not steers:
            return None
        classes = prompt_classes(layout.spans, class_count([steer.chosen for steer in steers], len(layout.images)))
        inverse = torch.cat(sequence.captured[NAME])  # (prompt tokens, layers)
        sums, count = (inverse.T @ to_device(classes, inverse)).cpu(), classes.sum(0)
        touched = {layer for steer in steers for layer in steer.touched_layers}
        norms = {layer: torch.stack([count, sums[layer]]) for layer in sorted(touched)}
        course = None
        if _loop(sequence) is not None:
            first = sequence.prompt.length - 1
            course = self.course[sequence.slot, first : first + 1 + sequence.fed].to("cpu", copy=True)
        return norms, sequence.fed, course


def _loop(sequence: Row) -> Steer | None:
    """Return the vector of a sequence whose strength follows a number."""
    options = sequence.spec.asked.get(NAME)
    return options.loop if isinstance(options, Steering) else None


def _steers(sequence: Row) -> tuple[Steer, ...]:
    options = sequence.spec.asked.get(NAME)
    return options.steers if isinstance(options, Steering) else ()
