"""SAGE's second stage, Think: FFN updates that override those of attention are damped (SAGE paper, section 5.1, eq. 5).

Per layer and token D = KL(softmax(delta_mha) || softmax(delta_ffn)) over the d components of the two updates of the
residual stream; where D exceeds the layer's threshold, the layer's output is h_mid + gamma * delta_ffn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field

from steering.decoder.hooks import Hook, LayerHook
from steering.decoder.updates import Updates
from steering.devices import fill_slot, to_device
from steering.errors import RequestError
from steering.measures import divergence
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import Options
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, Pool, PrefillChunk, Reuse, Slots
from steering.recorders.counting import NEVER, newly

NAME = "sage.think"
UNCALIBRATED = (
    "the model has no calibration for sage.think: its thresholds are those of the self-check's two prompts; "
    "'helmsight probe --calibrate-sage' measures them"
)
"""The warning in a report whose thresholds nobody calibrated."""


class Think(Options):
    """Damp FFN updates that override those of attention (SAGE's Think).

    `gamma` scales them. D (nats) is compared with `threshold` in every layer. Where that is None, it is compared with the
    layer's `quantile` of D as measured by the model's calibration or else by the self-check, on its two prompts. SAGE paper,
    section 5.1, equation 5. Raises RequestError for values out of range.
    """

    path = ("sage", "think")

    gamma: float = Field(0.9, ge=0, le=1)
    quantile: float = Field(0.9, ge=0, le=1)
    threshold: float | None = Field(None, ge=0, le=1e38)

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        mllm.need_updates(".".join(self.path))
        self.thresholds(mllm)

    def thresholds(self, mllm: MLLM) -> torch.Tensor:
        """Return the thresholds of the divergence, (layers,); raise RequestError where they were not measured."""
        if self.threshold is not None:
            return torch.full((mllm.num_layers,), self.threshold)
        if mllm.calibration is not None and mllm.calibration.divergence is not None:
            measured = mllm.calibration.thresholds(self.quantile)
        else:
            measured = None if mllm.checked is None else mllm.checked.thresholds(self.quantile)
        if measured is None:
            raise RequestError(
                f"{mllm.name} was not calibrated for 'sage.think'; give 'sage.think.threshold', or run "
                "'helmsight probe --calibrate-sage' on it.",
                param="sage.think.threshold",
            )
        return measured

    def settled(self, mllm: MLLM) -> ThinkThresholds:
        """Return the thresholds with their origin."""
        calibration = mllm.calibration if self.threshold is None else None
        measured = calibration is not None and calibration.divergence is not None
        return ThinkThresholds(
            tuple(self.thresholds(mllm).tolist()),
            None if self.threshold is not None else measured,
            calibration.digest if calibration is not None and measured else None,
        )

    def report(self, measured: Any) -> dict[str, Any]:
        """Report by layer the share of damped updates and the mean of D, and the origin of the thresholds.

        measured: `Thought`.
        """
        damped, differs = (measured.measured / max(measured.tokens, 1)).unbind(-1)
        origin = measured.thresholds
        return {
            "suppressed": damped.tolist(),
            "divergence": differs.tolist(),
            "calibrated": None if origin is None else origin.calibrated,
            "calibration": None if origin is None else origin.calibration,
            **({"warning": UNCALIBRATED} if origin is not None and origin.calibrated is False else {}),
        }


class ThinkThresholds(NamedTuple):
    """The thresholds of an answer, resolved once so that the whole answer is computed under the same ones.

    values: one per layer. calibrated: whether they are those of the model's calibration; None where the request gives them.
    calibration: its digest.
    """

    values: tuple[float, ...]
    calibrated: bool | None = None
    calibration: str | None = None


class ThinkCounts(NamedTuple):
    """The tensors in which a decode's damping is counted.

    active, counted: as in `recorders.counting`. sums: (rows, layers, 2), the number of damped updates, and the sum of D.
    """

    active: torch.Tensor
    counted: torch.Tensor
    sums: torch.Tensor


def damping(
    mha: torch.Tensor, ffn: torch.Tensor, gamma: torch.Tensor, threshold: torch.Tensor, layer: int, every: int
) -> torch.Tensor:
    """Return the relative change of each token's FFN update, whether D exceeds the threshold, and D: (rows, n, 3).

    The change is gamma - 1 where D is above the threshold, else 0 (SAGE paper, equation 5). D is 0 in rows with an infinite
    threshold, unless `every` is 1.

    mha, ffn: (rows, n, d), the updates, contiguous. gamma: (rows,). threshold: (rows, layers).
    """
    above, differs = threshold[:, layer, None], divergence(mha, ffn)
    if not every:
        differs = torch.where(above < torch.inf, differs, 0.0)
    over = differs > above
    return torch.stack([(gamma[:, None] - 1) * over, over.float(), differs], -1)


def add_damping(damped: torch.Tensor, positions: torch.Tensor, counts: ThinkCounts) -> None:
    """Add a decode's damping to `counts.sums`.

    damped: (rows, layers, 2), whether an update was damped, and D.
    """
    new = newly(positions, counts.active, counts.counted)[:, None, None]
    counts.sums.add_(torch.where(new, damped, 0.0))


class ThinkRows(LayerHook):
    """The damping of one forward pass, and its effect.

    gamma: (rows,). threshold: (rows, layers), infinite for rows without Think. real: (rows, n), 0 on padding. every: whether
    D is computed for these, too. counts: the tensors in which a decode was counted before it is settled, None where that is
    still to be done. Once settled, where nothing was counted, `by_token` (rows, n, layers, 2) tells whether an update was
    damped, and D; `measured` (rows, layers, 2), the number of damped updates and the sum of D over the real tokens.
    """

    by_token: torch.Tensor
    measured: torch.Tensor
    counts: ThinkCounts | None = None
    damping = staticmethod(damping)

    def __init__(self, gamma: torch.Tensor, threshold: torch.Tensor, real: torch.Tensor, every: bool = True):
        self._gamma, self._threshold, self._every = gamma, threshold, every
        self.real = real
        self._damped: list[torch.Tensor] = []  # by layer (rows, n, 3), as returned by `damping`

    def after(
        self, layer: int, before: torch.Tensor, plain: torch.Tensor, hidden: torch.Tensor, updates: Updates
    ) -> torch.Tensor:
        gamma, threshold = (tensor.to(hidden.device) for tensor in (self._gamma, self._threshold))
        mha, ffn = updates.mha.contiguous(), updates.ffn.contiguous()
        damped = self.damping(mha, ffn, gamma, threshold, layer, int(self._every))
        self._damped.append(damped.to(self.real.device))
        return torch.addcmul(hidden, damped[..., :1].to(hidden.dtype), ffn)

    def gathered(self) -> list[torch.Tensor]:
        """Return the results of `damping` by layer, and release them."""
        damped, self._damped = self._damped, []
        return damped

    def settle(self, positions: torch.Tensor | None) -> None:
        self.by_token = torch.stack(self.gathered(), 2)[..., 1:]
        self.measured = (self.by_token * self.real[..., None, None]).sum(1)


@dataclass(frozen=True)
class Thought:
    """The damping of one answer, on the CPU.

    measured: (layers, 2), the number of damped updates and the sum of D, over `tokens` tokens of prompt and answer.
    divergence: (layers, prompt tokens), in nats, where it was requested. thresholds: those of Think, where it was requested.
    """

    measured: torch.Tensor
    tokens: int
    divergence: torch.Tensor | None
    thresholds: ThinkThresholds | None = None


class ThinkSlots(Slots):
    """The settings of every slot, and the damping in it.

    gamma: (slots,). damps_above: (slots, layers), infinite where a slot does not use Think. sums: (slots, layers, 2), as
    `Thought.measured`. counted: (slots,), the last generated column of each slot that is included in the sums.
    """

    measured: ClassVar[tuple[str, ...]] = ("sums",)
    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.DIVERGENCE})

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self.gamma = torch.ones(pool.slots, device=pool.device)
        self.damps_above = torch.full((pool.slots, pool.layers), torch.inf, device=pool.device)
        self.sums = torch.zeros(pool.slots, pool.layers, 2, device=pool.device)
        self.counted = torch.full((pool.slots,), NEVER, device=pool.device)

    def place(self, sequence: Sequence) -> None:
        slot, think = sequence.slot, sequence.spec.asked.get(NAME)
        self.sums[slot] = 0
        fill_slot(self.counted, slot, -1 if isinstance(think, Think) else NEVER)
        fill_slot(self.gamma, slot, think.gamma if isinstance(think, Think) else 1.0)
        self.damps_above[slot] = torch.inf
        if isinstance(think, Think):
            self.damps_above[slot] = to_device(torch.tensor(self._thresholds_of(sequence).values), self.damps_above)

    def _thresholds_of(self, sequence: Sequence) -> ThinkThresholds:
        """Return the thresholds that the client resolved, or the model's own for a pass that no client asked for."""
        settled = sequence.spec.settled.get(NAME)
        if isinstance(settled, ThinkThresholds):
            return settled
        think = sequence.spec.asked[NAME]
        assert isinstance(think, Think)
        return think.settled(self.pool.mllm)

    def prefill(self, chunk: PrefillChunk) -> ThinkRows | None:
        if not any(NAME in sequence.spec.asked or sequence.wants(Signal.DIVERGENCE) for sequence in chunk.sequences):
            return None
        return self.rows(chunk)

    def rows(self, chunk: PrefillChunk) -> ThinkRows:
        """Return the damping of a chunk's rows, which leaves rows without Think as they are."""
        return ThinkRows(self.gamma[chunk.rows], self.damps_above[chunk.rows], to_device(chunk.real, self.gamma))

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if not isinstance(hook, ThinkRows):
            return
        self.sums[chunk.rows] += hook.measured
        for row, sequence in enumerate(chunk.sequences):
            if sequence.wants(Signal.DIVERGENCE):
                self._capture(sequence, hook.by_token[row, : chunk.lengths[row]])

    def _capture(self, sequence: Sequence, by_token: torch.Tensor) -> None:
        """Append D of further tokens of a prompt; by_token: (k, layers, 2)."""
        divergences, earlier = by_token[..., 1].T.clone(), sequence.captured.get(NAME)
        sequence.captured[NAME] = divergences if earlier is None else torch.cat([earlier, divergences], 1)

    def reuse(self, sequence: Sequence) -> Reuse:
        think = sequence.spec.asked.get(NAME)
        key: tuple[float, ...] = ()
        if isinstance(think, Think):
            key = (think.gamma, *self._thresholds_of(sequence).values)
        return Reuse(sequence.prompt.length, key, measured=self.concerns(sequence.spec.asked, sequence.spec.signals))

    def by_row(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> torch.Tensor | None:
        return hook.by_token if isinstance(hook, ThinkRows) else None

    def regain(self, sequence: Sequence, measured: torch.Tensor) -> None:
        self.sums[sequence.slot] += measured.sum(0)
        if sequence.wants(Signal.DIVERGENCE):
            self._capture(sequence, measured)

    def acts(self, sequences: list[Sequence]) -> bool:
        return any(NAME in sequence.spec.asked for sequence in sequences)

    def decode(self, batch: DecodeBatch) -> ThinkRows:
        rows = batch.rows
        return ThinkRows(self.gamma[rows], self.damps_above[rows], batch.active[:, 0], every=False)

    def counts(self, batch: DecodeBatch) -> ThinkCounts:
        """Return the tensors in which a decode of these rows is counted."""
        return ThinkCounts(batch.active, self.counted[batch.rows], self.sums[batch.rows])

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, ThinkRows) and hook.counts is None:
            add_damping(hook.by_token[:, 0], batch.positions, self.counts(batch))

    def take(self, sequence: Sequence) -> Thought | None:
        if NAME not in sequence.spec.asked and not sequence.wants(Signal.DIVERGENCE):
            return None
        tokens = sequence.prompt.length + sequence.fed
        divergences: torch.Tensor | None = sequence.captured.get(NAME)
        read = None if divergences is None else divergences.cpu()
        think = sequence.spec.asked.get(NAME)
        thresholds = self._thresholds_of(sequence) if isinstance(think, Think) else None
        return Thought(self.sums[sequence.slot].to("cpu", copy=True), tokens, read, thresholds)
