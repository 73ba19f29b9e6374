"""Effects of attention and FFN on the residual stream, per layer (SPD-Faith Bench paper, sections 4.3, 5.1, appendix D.4).

h_in, h_mid and h_out are the stream before a layer, after its attention and after its FFN, as the model computes them:
before Think damps an update and before a steering vector is added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import cosine_similarity, pad

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.measures import divergence
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.recorders.counting import NEVER, newly

NAME = "residual"
NAMES = (
    "mha_cosine",
    "ffn_cosine",
    "mha_change",
    "ffn_change",
    "mha_norm",
    "ffn_norm",
    "update_norm",
    "kl",
    "gate_ratio",
)
"""The readouts: cos(h_in, h_mid); cos(h_mid, h_out); |h_mid - h_in| / |h_in|; |h_out - h_mid| / |h_mid|; |h_mid - h_in|;

|h_out - h_mid|; |h_out - h_in| (L2 norms); D of Think; the share of the FFN's gates whose pre-activation is above 0.
"""


class StreamCounts(NamedTuple):
    """The tensors in which a decode's residual stream is counted.

    decoded: (rows, 1), above 0 where the row is summed. active, counted: as in `recorders.counting`. sums: (rows, layers,
    readouts). neurons: (rows, layers, width). totals: (rows, 2, layers, d), the sum of states, and the latest.
    """

    decoded: torch.Tensor
    active: torch.Tensor
    counted: torch.Tensor
    sums: torch.Tensor
    neurons: torch.Tensor
    totals: torch.Tensor


def share_above(gates: torch.Tensor) -> torch.Tensor:
    """Return the share (rows, n) of gates (rows, n, width) that is above 0; NaN without any."""
    return (gates > 0).float().mean(-1)


def measures_of(
    before: torch.Tensor, out: torch.Tensor, mha: torch.Tensor, ffn: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Return the readouts of h_in, h_out and the updates, (rows, n, readouts), in the order of `NAMES`.

    before, out, mha, ffn: (rows, n, d). gates: (rows, n), the share of gates that is above 0.
    """
    before, out, mha, ffn = (value.float() for value in (before, out, mha, ffn))
    middle = before + mha
    mha_norm, ffn_norm = mha.norm(dim=-1), ffn.norm(dim=-1)
    return torch.stack(
        [
            cosine_similarity(before, middle, dim=-1),
            cosine_similarity(middle, out, dim=-1),
            mha_norm / before.norm(dim=-1),
            ffn_norm / middle.norm(dim=-1),
            mha_norm,
            ffn_norm,
            (mha + ffn).norm(dim=-1),
            divergence(mha, ffn),
            gates,
        ],
        -1,
    )


def stream_looks(
    streams: list[torch.Tensor], states: list[torch.Tensor], gates: list[torch.Tensor], activations: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the measurements of one token a row.

    They are `measures_of` (rows, layers, readouts), states (rows, layers, d), and activations (rows, layers, width), padded
    with 0 after a layer's last one.

    streams: by layer h_in, h_out and the updates, (rows, 1, d), all in one list. states: by layer (rows, 1, d). gates,
    activations: by layer (rows, 1, its width), which is 0 where there are none.
    """
    before, out, mha, ffn = (torch.cat(streams[first::4], 1) for first in range(4))  # each operation costs a GPU launch
    return measures_of(before, out, mha, ffn, _shares(gates)), torch.cat(states, 1).float(), _side_by_side(activations)


def _side_by_side(layers: list[torch.Tensor]) -> torch.Tensor:
    """Stack layers (rows, 1, each its width) to (rows, layers, width), float32, padded with 0 to the widest."""
    widest = max(layer.shape[2] for layer in layers)
    return torch.cat(
        [layer if layer.shape[2] == widest else pad(layer, (0, widest - layer.shape[2])) for layer in layers], 1
    ).float()


def _shares(gates: list[torch.Tensor]) -> torch.Tensor:
    """Return `share_above` of each layer's gates (rows, 1, its width) as (rows, layers)."""
    alike = len({gate.shape[2] for gate in gates}) == 1
    return share_above(torch.cat(gates, 1)) if alike else torch.cat([share_above(gate) for gate in gates], 1)


def add_stream(
    measured: torch.Tensor,
    states: torch.Tensor,
    activations: torch.Tensor,
    positions: torch.Tensor,
    counts: StreamCounts,
) -> None:
    """Add the result of `stream_looks` for a decode to `counts`."""
    new = newly(positions, counts.active, counts.counted)[:, None, None]
    counts.sums.add_(torch.where(new & (counts.decoded[..., None] > 0), measured, 0.0))
    counts.neurons[..., : activations.shape[2]].add_(torch.where(new, activations, 0.0))
    total, latest = counts.totals.unbind(1)
    total.add_(torch.where(new, states, 0.0))
    latest.copy_(torch.where(new, states, latest))


class ResidualRows(LayerHook):
    """The residual stream of one forward pass, reduced layer by layer.

    weights: (rows, n), 1 on the queries that are summed, or (rows, 1) where only the `last` one (rows,) of each row is read.
    `last` is None in a decode, whose rows have one query and whose FFN activations are kept. counts: the tensors in which a
    decode was counted before it is settled, None where that is still to be done. Once settled, where nothing was counted,
    `measured` (rows, layers, readouts) are the sums over these queries in the order of `NAMES`, NaN where a model has no
    such gates; `states` (rows, layers, d), float32, the residual stream after each layer at each row's last query,
    interventions included; `activations` (rows, layers, width), padded with 0 after a layer's last one.
    """

    measured: torch.Tensor
    states: torch.Tensor
    activations: torch.Tensor
    counts: StreamCounts | None = None
    looks = staticmethod(stream_looks)

    def __init__(self, weights: torch.Tensor, last: torch.Tensor | None = None):
        self._weights, self._last = weights, last
        self._layers: list[list[torch.Tensor]] = []  # by layer: stream, output, gates, activations
        self._measured: list[torch.Tensor] = []  # by layer, where all queries are summed
        self._places: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        stream, home = (updates.stream(before), plain, updates.mha, updates.ffn), self._weights.device
        gate = before[..., :0] if updates.gate is None else updates.gate
        if 1 < plain.shape[1] == self._weights.shape[1]:
            self._measured.append(measures_of(*stream, share_above(gate)).to(home))
        fired = updates.activation(gate) if self._last is None else gate[..., :0]
        self._layers.append([self._values_at_last(tensor).to(home) for tensor in (*stream, hidden, gate, fired)])
        return hidden

    def _values_at_last(self, values: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            return values[:, -1:].contiguous()
        if values.device not in self._places:
            rows = torch.arange(values.shape[0], device=values.device)
            self._places[values.device] = rows, self._last.to(values.device)
        return values[self._places[values.device]][:, None]

    def gathered(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors gathered of all layers, as `stream_looks` takes them, and release them."""
        layers, self._layers, self._places = self._layers, [], {}
        streams = [stream for layer in layers for stream in layer[:4]]
        states, gates, fired = ([layer[at] for layer in layers] for at in (4, 5, 6))
        return streams, states, gates, fired

    def settle(self, positions: torch.Tensor | None) -> None:
        rows_measured, self._measured = self._measured, []
        measured, self.states, self.activations = self.looks(*self.gathered())
        measured = torch.stack(rows_measured, 2) if rows_measured else measured[:, None]  # (rows, n, layers, readouts)
        # Other rows may be padding, whose cosines are NaN.
        self.measured = torch.where(self._weights[..., None, None] > 0, measured, 0.0).sum(1)


@dataclass(frozen=True)
class Residual:
    """The residual stream of an answer, on the CPU.

    sums: (layers, readouts), over the requested rows. neurons: (layers,), the share of active neurons. states: (2, layers,
    d), the mean over the rows that generated the answer's tokens, and the last of them.
    """

    sums: torch.Tensor
    neurons: torch.Tensor
    states: torch.Tensor


class ResidualRecorder(Slots):
    """Sums of every slot's residual stream.

    sums: (slots, layers, readouts), over the requested rows. neurons: (slots, layers, width), FFN activations summed over
    the generated tokens that were fed. states: (slots, 2, layers, d), the stream summed over the rows that generated a
    token, and at the latest of them. decoded: (slots, 1), 1 where rows of generated tokens are summed. counted: (slots,),
    the last column of each slot that is included in the sums.
    """

    measured: ClassVar[tuple[str, ...]] = ("sums", "states")
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.UPDATES, Signal.STREAM})

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, layers, device = pool.slots, pool.layers, pool.device
        self.sums = torch.zeros(slots, layers, len(NAMES), device=device)
        self.neurons = torch.zeros(slots, layers, max(pool.mllm.ffn_widths), device=device)
        self.states = torch.zeros(slots, 2, layers, pool.mllm.hidden_size, device=device)
        self.decoded = torch.zeros(slots, 1, device=device)
        self.counted = torch.full((slots,), NEVER, device=device)

    def place(self, sequence: Sequence) -> None:
        diagnose, slot = sequence.spec.diagnose, sequence.slot
        self.decoded[slot] = 0.0
        fill_slot(self.counted, slot, -1 if _is_wanted(sequence) else NEVER)
        if diagnose is None or not _is_wanted(sequence):
            return
        self.sums[slot] = self.neurons[slot] = self.states[slot] = 0.0
        self.decoded[slot] = float(diagnose.residual_rows != "prompt")

    def prefill(self, chunk: PrefillChunk) -> ResidualRows | None:
        chosen = [*map(_chosen_rows, chunk.sequences)]
        if chunk.replay or not any(chosen) or not (chunk.complete or "prompt" in chosen):
            return None
        return self.rows(chunk)

    def rows(self, chunk: PrefillChunk) -> ResidualRows:
        """Return the hook that reads the queries of a chunk that its sequences need."""
        chosen = [*map(_chosen_rows, chunk.sequences)]
        prompt = "prompt" in chosen
        weights = torch.zeros(len(chosen), chunk.width if prompt else 1)
        for row, rows in enumerate(chosen):
            if rows == "prompt":
                weights[row, : chunk.lengths[row]] = 1.0
            elif rows == "answer" and chunk.complete:
                weights[row, chunk.lengths[row] - 1 if weights.shape[1] > 1 else 0] = 1.0
        return ResidualRows(to_device(weights, self.sums), to_device(chunk.last, self.sums.device))

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ResidualRows):
            return
        measured, states = hook.measured, hook.states
        for row, sequence in enumerate(chunk.sequences):
            if _is_wanted(sequence):
                self.sums[sequence.slot] += measured[row]
                if chunk.complete:
                    self.states[sequence.slot] = states[row]

    def reuse(self, sequence: Sequence) -> Reuse:
        diagnose = sequence.spec.diagnose
        every = _is_wanted(sequence) and diagnose is not None and diagnose.residual_rows == "prompt"
        return Reuse(0 if every else sequence.prompt.length)

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(_is_wanted(sequence) for sequence in sequences)

    def decode(self, batch: DecodeBatch) -> ResidualRows:
        return ResidualRows(self.decoded[batch.rows])

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, ResidualRows) and hook.counts is None:
            add_stream(hook.measured, hook.states, hook.activations, batch.positions, self.counts(batch))

    def counts(self, batch: DecodeBatch) -> StreamCounts:
        """Return the tensors in which a decode of these rows is counted."""
        rows = batch.rows
        tensors = (self.counted, self.sums, self.neurons, self.states)
        return StreamCounts(self.decoded[rows], batch.active, *[tensor[rows] for tensor in tensors])

    def take(self, sequence: Sequence) -> Residual | None:
        if not _is_wanted(sequence):
            return None
        slot = sequence.slot
        total, latest = self.states[slot].to("cpu", copy=True)  # a copy: the slot will be reused
        states = torch.stack([total / (sequence.fed + 1), latest])
        return Residual(self.sums[slot].to("cpu", copy=True), self.neuron_ratio(slot).cpu(), states)

    def neuron_ratio(self, slot: int) -> torch.Tensor:
        """Return the share of active FFN neurons, (layers,); NaN without gates.

        A neuron is active if its activation, summed over the generated tokens, is above 0 (SPD-Faith Bench, equations 20 and
        21; `analysis/neuron_activation.py`).
        """
        widths = torch.tensor([width or math.nan for width in self.pool.mllm.ffn_widths], device=self.neurons.device)
        return (self.neurons[slot] > 0).sum(-1) / widths


def _chosen_rows(sequence: Sequence) -> str | None:
    """Return the rows that a sequence reads, "prompt" or "answer" for instance, or None."""
    diagnose = sequence.spec.diagnose
    return diagnose.residual_rows if _is_wanted(sequence) and diagnose is not None else None


def _is_wanted(sequence: Sequence) -> bool:
    return sequence.spec.diagnose is not None and sequence.wants(Signal.UPDATES, Signal.STREAM)
