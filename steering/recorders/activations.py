"""Recorder of the residual stream after chosen layers, at chosen positions of prompt and answer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import to_device
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Reuse, Slots

NAME = "activations"


@dataclass(frozen=True)
class StateChoice:
    """The states that a request wants: layers, counted from 0 (None for all), and positions.

    positions: the prompt's "last" token, the "generated" ones, or those from the first number up to, not including, the
    second, counted from 0 over the prompt's tokens (image tokens included) and the answer's.
    """

    layers: tuple[int, ...] | None = None
    positions: Literal["last", "generated"] | tuple[int, int] = "last"

    def layers_of(self, count: int) -> tuple[int, ...]:
        """Return the layers of a model with `count`."""
        return tuple(range(count)) if self.layers is None else self.layers

    def columns(self, prompt: int) -> tuple[int, int]:
        """Return the first position, and the end, behind a prompt of so many tokens."""
        if self.positions == "last":
            return prompt - 1, prompt
        return (prompt, sys.maxsize) if self.positions == "generated" else self.positions


@dataclass(frozen=True)
class Activations:
    """The residual stream of an answer: states (layers, positions, d) in the model's dtype, on the CPU, from `first` on."""

    first: int
    states: torch.Tensor


class ChosenStates(LayerHook):
    """Reads the residual stream of one pass at chosen tokens, interventions included.

    rows, places: (k,), the tokens' rows and their places in them. states: by layer (k, d).
    """

    def __init__(self, rows: torch.Tensor, places: torch.Tensor, layers: frozenset[int]):
        self.states: dict[int, torch.Tensor] = {}
        self._rows, self._places, self._layers = rows, places, layers

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        if layer in self._layers:
            chosen = hidden[self._rows.to(hidden.device), self._places.to(hidden.device)]
            self.states[layer] = chosen.to(self._rows.device)
        return hidden

    def of(self, layers: tuple[int, ...], part: slice) -> torch.Tensor:
        """Return the states of a part of the tokens, (layers, part, d)."""
        return torch.stack([self.states[layer][part] for layer in layers])


class ActivationsRecorder(Slots):
    """Keeps the states with their sequence, in pieces: those of each pass."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ACTIVATIONS})

    def prefill(self, chunk: PrefillChunk) -> ChosenStates | None:
        parts = self._parts(chunk)
        if not any(parts):
            return None
        rows = [row for row, part in enumerate(parts) for _ in part]
        return self._hook(rows, [place for part in parts for place in part], chunk.sequences)

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ChosenStates):
            return
        end = 0
        for sequence, part in zip(chunk.sequences, self._parts(chunk), strict=True):
            begin, end = end, end + len(part)
            if part:
                self._add(sequence, hook, slice(begin, end))

    def reuse(self, sequence: Sequence) -> Reuse:
        length = sequence.prompt.length
        choice = _choice(sequence)
        return Reuse(length if choice is None else min(choice.columns(length)[0], length))

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(map(_reads_answer, sequences))

    def decode(self, batch: DecodeBatch) -> ChosenStates:
        rows = [row for row, sequence in enumerate(batch.sequences) if _reads_answer(sequence)]
        return self._hook(rows, [0] * len(rows), batch.sequences)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ChosenStates):
            return
        for place, sequence in enumerate(filter(_reads_answer, batch.sequences)):
            if not sequence.held:
                self._add(sequence, hook, slice(place, place + 1))

    def take(self, sequence: Sequence) -> Activations | None:
        choice = _choice(sequence)
        if choice is None:
            return None
        prompt = sequence.prompt.length
        first, end = choice.columns(prompt)
        pieces = sequence.captured.get(NAME, ())
        if not pieces:
            mllm = self.pool.mllm
            shape = (len(choice.layers_of(mllm.num_layers)), 0, mllm.hidden_size)
            return Activations(first, torch.zeros(shape, dtype=mllm.dtype))
        captured = min(first, prompt)  # every generated token is captured, also before the range
        return Activations(first, torch.cat(pieces, 1)[:, first - captured : end - captured].cpu())

    def _parts(self, chunk: PrefillChunk) -> list[range]:
        """Return the chosen places of each row of a chunk."""
        parts = []
        for sequence, start, length in zip(chunk.sequences, chunk.starts, chunk.lengths, strict=True):
            choice = None if chunk.replay else _choice(sequence)
            first, end = (0, 0) if choice is None else choice.columns(sequence.prompt.length)
            parts.append(range(max(first - start, 0), min(end - start, length)))
        return parts

    def _hook(self, rows: list[int], places: list[int], sequences: list[Sequence]) -> ChosenStates:
        mllm = self.pool.mllm
        choices = filter(None, map(_choice, sequences))
        layers = frozenset(layer for choice in choices for layer in choice.layers_of(mllm.num_layers))
        return ChosenStates(
            to_device(torch.tensor(rows), mllm.device), to_device(torch.tensor(places), mllm.device), layers
        )

    def _add(self, sequence: Sequence, hook: ChosenStates, part: slice) -> None:
        choice = _choice(sequence)
        assert choice is not None
        states = hook.of(choice.layers_of(self.pool.mllm.num_layers), part)
        sequence.captured[NAME] = (*sequence.captured.get(NAME, ()), states)


def _choice(sequence: Sequence) -> StateChoice | None:
    diagnose = sequence.spec.diagnose
    return diagnose.states if diagnose is not None and sequence.wants(Signal.ACTIVATIONS) else None


def _reads_answer(sequence: Sequence) -> bool:
    choice = _choice(sequence)
    return choice is not None and choice.columns(sequence.prompt.length)[1] > sequence.prompt.length
