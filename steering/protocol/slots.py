"""The common base of interventions and recorders: state in every slot, and hooks in every forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch

from steering.decoder.hooks import Hook
from steering.model.mllm import MLLM
from steering.prompt.tokens import TokenChoice
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal, StepGauge


@dataclass(frozen=True)
class Pool:
    """The capacity of an engine: slots of `length` columns each, whose prompts hold at most `max_images` images."""

    mllm: MLLM
    slots: int
    length: int
    max_images: int

    @property
    def layers(self) -> int:
        return self.mllm.num_layers

    @property
    def device(self) -> torch.device:
        return self.mllm.device


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens start..start+length of some prompts, one prompt a row, padded on the right.

    `starts` are above 0 where a long prompt comes in chunks, and where a prompt's first tokens are cached. complete: the
    chunk holds the prompts' ends. replay: the chunk holds the tokens that were generated before a twin joined. padded: the
    least `width`.
    """

    sequences: list[Sequence]
    starts: list[int]
    lengths: list[int]
    complete: bool
    replay: bool = False
    padded: int = 0

    @property
    def rows(self) -> slice:
        """The slots of the rows, which are consecutive."""
        first = self.sequences[0].slot
        return slice(first, first + len(self.sequences))

    @property
    def columns(self) -> int:
        """The number of columns of the pool that its queries may see."""
        return max(start + length for start, length in zip(self.starts, self.lengths, strict=True))

    @property
    def width(self) -> int:
        return max(*self.lengths, self.padded)

    @property
    def singles(self) -> list[PrefillChunk]:
        """A chunk for each prompt."""
        rows = zip(self.sequences, self.starts, self.lengths, strict=True)
        return [replace(self, sequences=[one], starts=[start], lengths=[length]) for one, start, length in rows]

    @property
    def wanted(self) -> list[list[int]]:
        """For each row, the numbers of its tokens behind which recurrent states are wanted."""
        rows = zip(self.sequences, self.starts, self.lengths, strict=True)
        return [
            [at - start for at in one.prefill.wanted if start < at <= start + length] for one, start, length in rows
        ]

    def latest(self, new: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return what `Slots.prepare_logits` writes for its rows, (rows, ...) both: all of `new`."""
        return new

    @cached_property
    def last(self) -> torch.Tensor:
        """The index of each row's last token, (rows,) int64 on the CPU."""
        return torch.tensor(self.lengths) - 1

    @property
    def real(self) -> torch.Tensor:
        """A mask (rows, n) float32 on the CPU: 1 on tokens, 0 on padding."""
        return (torch.arange(self.width) < torch.tensor(self.lengths)[:, None]).float()

    def touched(self, choices: Iterable[TokenChoice | None]) -> torch.Tensor:
        """Return a mask (rows, n) float32 on the CPU: 1 on the tokens that each row's choice holds; None holds none."""
        touched = torch.zeros(len(self.sequences), self.width)
        for row, (sequence, choice) in enumerate(zip(self.sequences, choices, strict=True)):
            if choice is None:
                continue
            start, length = self.starts[row], self.lengths[row]
            if self.replay:
                touched[row, :length] = float(choice.generated)
            else:
                touched[row, :length] = choice.touched(sequence.prompt.layout.spans)[start : start + length]
        return touched


@dataclass(frozen=True)
class Computed:
    """The results of a forward pass.

    hidden: (rows, n, d), normalised, after the last layer. logits: (rows, vocabulary) of the last token of each row, None
    where a chunk does not hold the prompts' ends. numbers: by the names of `gauges`, what recorders measured of each row's
    last token, (rows,) on the model's device, for interventions, which keep after them. NaN where a row has no such number.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class DecodeBatch:
    """A decode step of all running sequences, row i in slot i.

    positions: (rows,) the columns that are written. columns: the number of columns that are read. active: (rows, 1, 1), 0
    for rows whose result is discarded.
    """

    sequences: list[Sequence]
    positions: torch.Tensor
    columns: int
    active: torch.Tensor

    @property
    def rows(self) -> slice:
        return slice(0, len(self.sequences))

    def latest(self, new: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return what `Slots.prepare_logits` writes, (rows, ...): `new`, `previous` where a row's result is discarded."""
        if not any(sequence.held for sequence in self.sequences):
            return new
        return torch.where(self.active.view(-1, *[1] * (new.ndim - 1)) > 0, new, previous)

    @cached_property
    def written(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The index of the rows' new tokens in a tensor (slots, columns, ...)."""
        return torch.arange(len(self.sequences), device=self.positions.device), self.positions


@dataclass(frozen=True)
class LookAhead:
    """Answers whose next tokens are about to be chosen, and functions that run candidates for them.

    rows: their slots, which are consecutive. positions: (rows,), the columns of their last tokens. hook: the own hook of the
    pass that gave the logits, None behind a prompt. logits: (rows, vocabulary), masked and contrasted. run: runs one token a
    row, (rows,), behind the last ones under a hook, with the other interventions as they act, and leaves nothing behind but
    what the hook read. Each call costs a pass of all rows. run_together: runs several tokens behind each of some rows,
    (some, n), in a single pass under a hook of some * n rows; returns False, and runs nothing, where other interventions
    act in these rows.
    """

    sequences: list[Sequence]
    rows: slice
    positions: torch.Tensor
    hook: Hook | None
    logits: torch.Tensor
    run: Callable[[torch.Tensor, Hook], None]
    run_together: Callable[[list[int], torch.Tensor, Hook], bool]


class Reuse(NamedTuple):
    """The part of a prompt that can come from a cache instead of being computed.

    rows: how many first tokens may be left out, because nothing needs what only computing them shows. key: what is done to
    them; equal keys do the same to equal tokens. measured: `Slots.by_row` of them is needed. generated: the same is done to
    generated tokens.
    """

    rows: int
    key: Hashable = ()
    measured: bool = False
    generated: bool = True


class Slots:
    """Fixed tensors with settings and measurements of every slot, neutral where nothing was asked for.

    Every tensor that is an attribute has the slot as its first dimension. `measured` names those that hold a prompt's
    measurements, which a copy of the prompt needs. `gauges` are the numbers that a recorder puts into `Computed.numbers` of
    passes in which a row wants their signal. It takes part in a forward pass where some row asks for the intervention of its
    name or wants one of its `signals`, and, with `always`, in every one.
    """

    name: str
    measured: ClassVar[tuple[str, ...]] = ()
    signals: ClassVar[frozenset[Signal]] = frozenset()
    gauges: ClassVar[Mapping[str, StepGauge]] = {}
    always: ClassVar[bool] = False

    def __init__(self, name: str, pool: Pool):
        self.name = name
        self.pool = pool

    def concerns(self, names: Collection[str], signals: frozenset[Signal]) -> bool:
        """Return True where it takes part in passes with these interventions (by name) and signals."""
        return self.always or self.name in names or not self.signals.isdisjoint(signals)

    def holds(self, sequence: Sequence) -> bool:
        """Return True where it keeps anything of a sequence in its slot.

        Where it does not, and did not for the previous sequence, the slot is left as it is: neither placed nor moved.
        """
        return self.concerns(sequence.spec.asked, sequence.spec.signals)

    def place(self, sequence: Sequence) -> None:
        """Write a sequence's settings into its slot, neutral ones where it did not ask."""

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another."""
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                tensor[target] = tensor[source]

    def may_hook(self, chunk: PrefillChunk) -> bool:
        """Return False where it certainly has no hook in a prefill."""
        return type(self).prefill is not Slots.prefill and any(map(self.holds, chunk.sequences))

    def prefill(self, chunk: PrefillChunk) -> Hook | None:
        """Return the hook for a prefill; None where none of the rows asks for it."""
        return None

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        """Keep the measurements of a prefill."""

    def reuse(self, sequence: Sequence) -> Reuse | None:
        """Return which part of a prompt may come from a cache; None where that is unknown, so that all of it is computed.

        The last row does not count: it is always computed.
        """
        own = type(self)
        looks = own.prefill is not Slots.prefill or own.keep is not Slots.keep
        return None if looks else Reuse(sequence.prompt.length, generated=own.decode is Slots.decode)

    def by_row(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> torch.Tensor | None:
        """Return what a prefill measured of each token, (rows, n, ...), to be cached with keys and values for `regain`."""
        return None

    def regain(self, sequence: Sequence, measured: torch.Tensor) -> None:
        """Count what was measured of a prompt's first k tokens, (k, ...), as if they had been computed now."""

    def acts(self, sequences: list[Sequence]) -> bool:
        """Return True where a decode of these sequences needs its hook."""
        return type(self).decode is not Slots.decode

    def decode(self, batch: DecodeBatch) -> Hook | None:
        """Return the hook for a decode, neutral in the rows that do not ask for it; called where `acts` is True."""
        return None

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        """Keep the measurements of a decode, once its result is known to count."""

    def prepare_logits(self, batch: PrefillChunk | DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        """Write into the slots what `logits` needs to know of each row's last token.

        Called after every pass that ends with logits, of prompts and of generated tokens alike, and always before `logits`,
        which may come steps later (a leader that waits for its twin) or for another slot (a copy of a prompt: name the
        tensor in `measured`). A step that raised is run again, so overwrite and never count; of a decode, write what
        `latest` returns.
        """

    def look_ahead(self, ahead: LookAhead) -> None:
        """Try candidates for the next tokens, before `logits`; overwrite and never count, as `prepare_logits`.

        Called for all rows of a decode together, and for each answer behind its prompt.
        """

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (rows, vocabulary) of the next tokens of some slots, as the sampler will see them.

        Do not change the input in place: a waiting leader's logits are contrasted with it. It comes masked by the rows'
        grammars, then contrasted with the twins' logits, then changed by the interventions registered before this one;
        penalties, temperature, forced tokens and log-probabilities follow.
        """
        return logits

    def take(self, sequence: Sequence) -> Any:
        """Return the measurements of a finished answer, on the CPU."""
        return None

    def left(self, sequence: Sequence) -> Any:
        """Return what a sequence's prompt left behind, at its end, for `restore`."""
        tensors = {name: getattr(self, name)[sequence.slot].clone() for name in self.measured}
        return tensors, copy.copy(sequence.captured.get(self.name))

    def restore(self, sequence: Sequence, snapshot: Any) -> None:
        """Let a sequence continue where the prompt of another one ended."""
        tensors, captured = snapshot
        for name, tensor in tensors.items():
            getattr(self, name)[sequence.slot] = tensor
        if captured is not None:
            sequence.captured[self.name] = copy.copy(captured)


class HookPlan(NamedTuple):
    """The slots that take part in a forward pass.

    acting: in the order in which they act, because recorders see what interventions change. keeping: in the order in which
    they keep, because interventions depend on what recorders captured. looking: those that look ahead, mostly none.
    """

    acting: list[Slots]
    keeping: list[Slots]
    looking: list[Slots]


class HookPlans:
    """A cached lookup of the slots that take part in a pass; steps are short, and most slots take part in few of them."""

    def __init__(self, recorders: Mapping[str, Slots], interventions: Mapping[str, Slots]):
        self._recorders = recorders
        self._interventions = interventions
        self._known: dict[tuple[frozenset[str], frozenset[Signal]], HookPlan] = {}

    @property
    def every(self) -> list[Slots]:
        """All slots, in the order in which they act."""
        return [*self._interventions.values(), *self._recorders.values()]

    def of(self, sequences: Iterable[Sequence]) -> HookPlan:
        """Return the slots that take part in a forward pass of these sequences."""
        row_names, row_signals = zip(*{sequence.spec.concern for sequence in sequences}, strict=True)
        names, signals = frozenset[str]().union(*row_names), frozenset[Signal]().union(*row_signals)
        if (names, signals) not in self._known:

            def those(parts: Mapping[str, Slots]) -> list[Slots]:
                return [part for part in parts.values() if part.concerns(names, signals)]

            recorders, interventions = those(self._recorders), those(self._interventions)
            acting, looks = [*interventions, *recorders], Slots.look_ahead
            looking = [part for part in acting if type(part).look_ahead is not looks]
            self._known[names, signals] = HookPlan(acting, [*recorders, *interventions], looking)
        return self._known[names, signals]
