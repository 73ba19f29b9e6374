"""What attention and FFN do to the residual stream, per layer (SPD-Faith Bench paper, sections 4.3 and 5.1, appendix D.4).

h_in, h_mid and h_out are the stream before a layer, after its attention and after its FFN, as the model makes them: before
Think damps an update and before a steering vector is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING, Any

import torch

from steering.diagnostics.numbers import known
from steering.diagnostics.options import Diagnose
from steering.interventions.think import divergence

if TYPE_CHECKING:
    from steering.residual import Updates

NAMES = ("mha_cosine", "ffn_cosine", "mha_change", "ffn_change", "mha_norm", "ffn_norm", "kl", "gate_ratio")
"""cos(h_in, h_mid); cos(h_mid, h_out); |h_mid - h_in| / |h_in|; |h_out - h_mid| / |h_mid|; |h_mid - h_in|; |h_out - h_mid|
(L2 norms); D of Think; the share of the FFN's gates whose pre-activation is above 0."""


class ResidualRows:
    """The residual stream of one forward pass, reduced layer by layer.

    weights: (rows, n), 1 on the queries that are summed, or (rows, 1) where only the `last` one (rows,) of each row is
    looked at. `last` is None in a decode, whose rows have one query and whose FFN activations are kept.
    """

    def __init__(self, weights: torch.Tensor, last: torch.Tensor | None = None):
        self._weights, self._last = weights, last
        self._sums: list[torch.Tensor] = []
        self._states: list[torch.Tensor] = []
        self._activations: list[torch.Tensor | None] = []

    def keep(
        self, layer: int, before: torch.Tensor, hidden: torch.Tensor, updates: Updates, steered: torch.Tensor
    ) -> None:
        """Called behind a layer. before, hidden: (rows, n, d), its input and its own output; steered: what is handed on."""
        self._states.append(self._at_last(steered)[:, 0])
        kept = (before, hidden, updates.mha, updates.ffn, updates.gate)
        if self._weights.shape[1] < hidden.shape[1]:
            kept = tuple(None if value is None else self._at_last(value) for value in kept)  # type: ignore[assignment]
        measured = _measured(*kept)  # (rows, n, readouts)
        # What is not wanted may be padding, whose cosines are nothing.
        self._sums.append(torch.where(self._weights[..., None] > 0, measured, 0.0).sum(1))
        if self._last is None:
            gate = updates.gate
            self._activations.append(None if gate is None else updates.activation(gate[:, -1]).float())

    def _at_last(self, values: torch.Tensor) -> torch.Tensor:
        if self._last is None:
            return values[:, -1:]
        return values[torch.arange(len(values), device=values.device), self._last][:, None]

    def states(self) -> torch.Tensor:
        """(rows, layers, d): the residual stream after each layer at each row's last query, interventions included."""
        return torch.stack(self._states, 1)

    def measured(self) -> torch.Tensor:
        """(rows, layers, readouts), in the order of `NAMES`, summed over the wanted queries; NaN where a model has no such
        gates."""
        return torch.stack(self._sums, 1)

    def add_activations(self, neurons: torch.Tensor, active: torch.Tensor) -> None:
        """Add a decode's FFN activations to neurons (rows, layers, width). active: (rows, 1)."""
        for layer, activation in enumerate(self._activations):
            if activation is not None:
                neurons[:, layer, : activation.shape[1]] += activation * active


def _measured(
    before: torch.Tensor, out: torch.Tensor, mha: torch.Tensor, ffn: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """(rows, n, readouts) of h_in, h_out and the updates (rows, n, d) between them, gates (rows, n, width)."""
    before, out, mha, ffn = (value.float() for value in (before, out, mha, ffn))
    middle = before + mha
    cosine = torch.nn.functional.cosine_similarity
    mha_norm, ffn_norm = mha.norm(dim=-1), ffn.norm(dim=-1)
    gates = torch.full_like(mha_norm, math.nan) if gate is None else (gate > 0).float().mean(-1)
    return torch.stack(
        [
            cosine(before, middle, dim=-1),
            cosine(middle, out, dim=-1),
            mha_norm / before.norm(dim=-1),
            ffn_norm / middle.norm(dim=-1),
            mha_norm,
            ffn_norm,
            divergence(mha, ffn),
            gates,
        ],
        -1,
    )


class ResidualSlots:
    """What every slot's residual stream summed up to.

    sums: (slots, layers, readouts), over the rows that were asked for. neurons: (slots, layers, width), FFN activations
    summed over the generated tokens that were fed. states: (2, slots, layers, d), the stream summed over the rows that
    generated a token, and at the latest of them. decoded: (slots, 1), 1 where rows of generated tokens are summed.
    """

    def __init__(self, slots: int, widths: Rows[int], hidden: int, device: torch.device):
        layers = len(widths)
        self.widths = torch.tensor(widths, device=device)
        self.sums = torch.zeros(slots, layers, len(NAMES), device=device)
        self.neurons = torch.zeros(slots, layers, max(widths), device=device)
        self.states = torch.zeros(2, slots, layers, hidden, device=device)
        self.decoded = torch.zeros(slots, 1, device=device)

    def place(self, slot: int, diagnose: Diagnose | None) -> None:
        """A new sequence in a slot."""
        if diagnose is None or not diagnose.wants_residual:
            return
        self.sums[slot] = self.neurons[slot] = self.states[:, slot] = 0.0
        self.decoded[slot] = float(diagnose.residual_rows != "prompt")

    def move(self, source: int, target: int) -> None:
        """Copy a slot's sums to another slot."""
        for tensor in (self.sums, self.neurons, self.decoded):
            tensor[target] = tensor[source]
        self.states[:, target] = self.states[:, source]

    def prefill(
        self, asked: Rows[Diagnose | None], lengths: Rows[int], last: torch.Tensor | None
    ) -> ResidualRows | None:
        """What is to be read of a chunk of prompts, of which each row has `asked` for something; `last` (rows,) is each
        prompt's last row where the chunk holds it. None where nobody wants any."""
        chosen = [one.residual_rows if one is not None and one.wants_residual else None for one in asked]
        if all(rows is None for rows in chosen) or (last is None and "prompt" not in chosen):
            return None
        width = max(lengths) if "prompt" in chosen else 1
        weights = torch.zeros(len(asked), width)
        for row, rows in enumerate(chosen):
            if rows == "prompt":
                weights[row, : lengths[row]] = 1.0
            elif rows == "answer" and last is not None:
                weights[row, lengths[row] - 1 if width > 1 else 0] = 1.0
        if last is None:
            last = torch.tensor(lengths, device=self.sums.device) - 1
        return ResidualRows(weights.to(self.sums.device), last)

    def keep(self, slot: int, measured: torch.Tensor, states: torch.Tensor | None) -> None:
        """Add what a chunk of a prompt measured. measured: (layers, readouts). states: (layers, d), at the prompt's last
        row, where the chunk held it."""
        self.sums[slot] += measured
        if states is not None:
            self.states[:, slot] = states.float()

    def decode(self, rows: int, active: torch.Tensor) -> ResidualRows:
        """What is to be read of a decode of the first rows. active: (rows, 1), 0 for rows whose step is for nothing."""
        return ResidualRows(self.decoded[:rows] * active)

    def record(self, readout: ResidualRows, active: torch.Tensor) -> None:
        """Add what a decode of the first rows measured. active: (rows, 1, 1)."""
        measured, states = readout.measured(), readout.states().float()
        rows = len(states)
        self.sums[:rows] += measured
        readout.add_activations(self.neurons[:rows], active[:, 0])
        self.states[0, :rows] += states * active
        self.states[1, :rows] = torch.where(active > 0, states, self.states[1, :rows])

    def neuron_ratio(self, slot: int) -> torch.Tensor:
        """(layers,): the share of FFN neurons whose activation, summed over the generated tokens, is above 0 (SPD-Faith
        Bench, equations 20 and 21; `analysis/neuron_activation.py`); NaN without gates."""
        return (self.neurons[slot] > 0).sum(-1) / torch.where(self.widths > 0, self.widths, math.nan)


def residual(sums: torch.Tensor, rows: int, neurons: torch.Tensor, kind: str) -> dict[str, Any]:
    """The `residual` readout: means over `rows` rows of a kind, by layer. sums: (layers, readouts). neurons: (layers,)."""
    means = dict(zip(NAMES, (sums / rows if rows else sums * math.nan).T, strict=True))
    return {
        "rows": {"kind": kind, "count": rows},
        **{name: known(values) for name, values in {**means, "neuron_ratio": neurons}.items()},
    }
