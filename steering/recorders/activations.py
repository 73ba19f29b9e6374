"""Recorder of the residual stream after chosen layers, at chosen positions of prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import to_device
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal, StateChoice
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Reuse, Slots

NAME = "activations"

Rows = tuple[int, ...] | list[int]


@dataclass(frozen=True)
class Activations:
    """The residual stream of an answer: states (layers, positions, d) in the model's dtype, on the CPU, from `first` on."""

    first: int
    states: torch.Tensor


class ChosenStates(LayerHook):
    """Reads the residual stream of one pass at chosen tokens, interventions included.

    rows, places: (k,), the tokens' rows and their places in them. states: by layer (k, d).
    """

    def __init__(self, rows: torch.Tensor, places: torch.Tensor, layers: tuple[int, ...]):
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
    """Keeps the states that each readout chose with their sequence, in pieces: those of each pass."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.ACTIVATIONS})

    def prefill(self, chunk: PrefillChunk) -> ChosenStates | None:
        chosen = [(row, place) for row, parts in enumerate(self._parts(chunk)) for _, part in parts for place in part]
        if not chosen:
            return None
        rows, places = zip(*chosen, strict=True)
        return self._hook(rows, places, chunk.sequences)

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ChosenStates):
            return
        end = 0
        for sequence, parts in zip(chunk.sequences, self._parts(chunk), strict=True):
            for name, part in parts:
                begin, end = end, end + len(part)
                if part:
                    self._add(sequence, name, hook, slice(begin, end))

    def reuse(self, sequence: Sequence) -> Reuse:
        length = sequence.prompt.length
        return Reuse(min((choice.columns(length)[0] for choice in _choices(sequence).values()), default=length))

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(map(_reads_answer, sequences))

    def decode(self, batch: DecodeBatch) -> ChosenStates:
        rows = range(len(batch.sequences))  # all, so that a step has one shape whoever asks
        return self._hook(list(rows), [0] * len(rows), batch.sequences)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ChosenStates):
            return
        for row, sequence in enumerate(batch.sequences):
            for name in [] if sequence.held else _of_answer(sequence):
                self._add(sequence, name, hook, slice(row, row + 1))

    def take(self, sequence: Sequence) -> Mapping[str, Activations]:
        """Return the states by readout."""
        prompt, mllm = sequence.prompt.length, self.pool.mllm
        by_readout = {}
        for name, choice in _choices(sequence).items():
            first, end = choice.columns(prompt)
            pieces = sequence.captured.get(NAME, {}).get(name)
            if pieces is None:
                shape = (len(choice.layers_of(mllm.num_layers)), 0, mllm.hidden_size)
                by_readout[name] = Activations(first, torch.zeros(shape, dtype=mllm.dtype))
                continue
            captured = min(first, prompt)  # every generated token is captured, also before the range
            states = torch.cat(pieces, 1)[:, first - captured : end - captured]
            by_readout[name] = Activations(first, states.cpu())
        return by_readout

    def _parts(self, chunk: PrefillChunk) -> list[list[tuple[str, range]]]:
        """Return the places of each row of a chunk that each readout chose."""
        rows = []
        for sequence, start, length in zip(chunk.sequences, chunk.starts, chunk.lengths, strict=True):
            parts = []
            for name, choice in ({} if chunk.replay else _choices(sequence)).items():
                first, end = choice.columns(sequence.prompt.length)
                parts.append((name, range(max(first - start, 0), min(end - start, length))))
            rows.append(parts)
        return rows

    def _hook(self, rows: Rows, places: Rows, sequences: list[Sequence]) -> ChosenStates:
        mllm = self.pool.mllm
        choices = [choice for sequence in sequences for choice in _choices(sequence).values()]
        layers = tuple(sorted({layer for choice in choices for layer in choice.layers_of(mllm.num_layers)}))
        return ChosenStates(
            to_device(torch.tensor(rows), mllm.device), to_device(torch.tensor(places), mllm.device), layers
        )

    def _add(self, sequence: Sequence, name: str, hook: ChosenStates, part: slice) -> None:
        layers = _choices(sequence)[name].layers_of(self.pool.mllm.num_layers)
        captured = sequence.captured.setdefault(NAME, {})
        captured[name] = (*captured.get(name, ()), hook.of(layers, part))


def _choices(sequence: Sequence) -> Mapping[str, StateChoice]:
    """Return the states that each readout chose."""
    diagnose = sequence.spec.diagnose
    return diagnose.activations if diagnose is not None and sequence.wants(Signal.ACTIVATIONS) else {}


def _of_answer(sequence: Sequence) -> list[str]:
    """Return the readouts that chose states of generated tokens."""
    length = sequence.prompt.length
    return [name for name, choice in _choices(sequence).items() if choice.columns(length)[1] > length]


def _reads_answer(sequence: Sequence) -> bool:
    return bool(_of_answer(sequence))
