"""A sequence: the state of one answer while it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch

from steering.grammar.compiled import Matcher
from steering.logprobs import TopLogprobs
from steering.model.embedded import Embedded
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.readout import Diagnose
from steering.protocol.request import Sampling
from steering.protocol.signals import Signal
from steering.protocol.text import TextStream
from steering.recurrent.states import Snapshot


class State(Enum):
    """The scheduling state of a sequence."""

    WAITING = auto()
    PREFILL = auto()
    RUNNING = auto()
    HELD = auto()
    """In its slot, until the next logits of its twin are known."""


@dataclass(frozen=True)
class Spec:
    """The fixed settings of one answer.

    asked: interventions by name. captured: signals to capture beside those that interventions and readouts need.
    state_position: the token of `Signal.PROMPT_STATE`, counted from the prompt's end. forced: tokens that are generated
    whatever the model predicts. edit: a function applied to the decoder's inputs before they run. settled: by
    intervention, the values that `InterventionSpec.settled` resolved for it.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int = 1
    seed: int = 0
    asked: Mapping[str, InterventionSpec] = field(default_factory=dict)
    diagnose: Diagnose | None = None
    captured: frozenset[Signal] = frozenset()
    state_position: int = -1
    forced: tuple[int, ...] = ()
    edit: Callable[[Embedded], Embedded] | None = None
    salt: str = ""
    settled: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def signals(self) -> frozenset[Signal]:
        """All signals to capture."""
        readouts = frozenset[Signal]() if self.diagnose is None else self.diagnose.signals
        return self.captured.union(readouts, *(intervention.signals for intervention in self.asked.values()))

    @cached_property
    def concern(self) -> tuple[frozenset[str], frozenset[Signal]]:
        """The names of its interventions, and its signals, which decide what acts in its forward passes."""
        return frozenset(self.asked), self.signals

    @cached_property
    def contrast(self) -> InterventionSpec | None:
        """The intervention that has a twin."""
        return next((intervention for intervention in self.asked.values() if intervention.twin), None)


@dataclass(eq=False)
class Pair:
    """A sequence (the leader) and its twin, whose logits are contrasted with the leader's.

    held: the leader's next logits (vocabulary,), while the twin's are not known. compared: the twin's, once they are, where
    both are to be compared. prompt: the twin's, where it does not depend on the generated tokens. made: what the twins were
    made from, in order, for the report.
    """

    leader: Sequence
    prompt: Prompt | None = None
    twin: Sequence | None = None
    held: torch.Tensor | None = None
    compared: torch.Tensor | None = None
    made: tuple[Any, ...] = ()


@dataclass
class QueuePlace:
    """The place of a sequence in the queue.

    group: its owner; groups get slots in turns. waited: it waits in the place of a request that it depends on (see `Turn`).
    start: its turn, in answers of each group (see `Scheduler`).
    """

    group: str = ""
    waited: bool = False
    start: int = 0


@dataclass
class PrefillState:
    """The state of a sequence's prompt until it has run, and its results that copies of it use.

    fork_of: a sequence with the same prompt and interventions, whose prefill can be copied. alone: it runs in a batch of its
    own. replay: the tokens generated before a twin joined late. reused: how many of the computed tokens came from a cache;
    unseen: how many of the first ones were embedded without their pictures. left, logits: the captures at the prompt's end,
    by recorder or intervention, and its last logits, for sequences that copy the prompt; left_states: its recurrent states,
    likewise. wanted: numbers of tokens behind which recurrent states are kept, ascending; states: these.
    """

    fork_of: Sequence | None = None
    expects_forks: bool = False
    alone: bool = False
    replay: tuple[int, ...] = ()
    reused: int = 0
    unseen: int = 0
    embedded: Embedded | None = None
    rope_delta: int | torch.Tensor = 0
    left: dict[str, Any] | None = None
    logits: torch.Tensor | None = None
    left_states: Snapshot = field(default_factory=dict)
    wanted: tuple[int, ...] = ()
    states: dict[int, Snapshot] = field(default_factory=dict)


@dataclass
class PendingOutput:
    """The results that a sequence puts out, with the numbers of its request and of its answer in that request.

    stops: its text, where a string in it may end it. in_pieces: tokens are put out as they come; `sent` of them were.
    in_flight: how many sampled tokens the host has not read yet. scores: log-probabilities of the tokens, where they are
    captured. taken: measurements of the whole answer on the CPU, by recorder or intervention.
    """

    request: int = 0
    answer: int = 0
    stops: TextStream | None = None
    in_pieces: bool = True
    sent: int = 0
    in_flight: int = 0
    logprobs: TopLogprobs | None = None
    scores: list[float] = field(default_factory=list)
    taken: dict[str, Any] = field(default_factory=dict)


@dataclass
class AnswerTimes:
    """AnswerTimes on the monotonic clock: queued, admitted to a slot, its first token and its last one so far."""

    queued: float = field(default_factory=time.monotonic)
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0


@dataclass(eq=False)
class Sequence:
    """The state of one answer from submission to its last token.

    The scheduler gives it a slot; recorders fill in what they captured. computed: columns of its prompt that are in the
    slot. matcher: its state in the grammar. captured: captures of its forward passes that lie outside of the slot, by
    recorder or intervention.
    """

    spec: Spec
    output: PendingOutput = field(default_factory=PendingOutput)
    queue: QueuePlace = field(default_factory=QueuePlace)
    prefill: PrefillState = field(default_factory=PrefillState)
    times: AnswerTimes = field(default_factory=AnswerTimes)
    pair: Pair | None = None
    matcher: Matcher | None = None

    state: State = State.WAITING
    slot: int = -1
    computed: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    cancelled: bool = False
    captured: dict[str, Any] = field(default_factory=dict)

    @property
    def prompt(self) -> Prompt:
        return self.spec.prompt

    @property
    def is_twin(self) -> bool:
        return self.pair is not None and self.pair.leader is not self

    @property
    def is_leader(self) -> bool:
        return self.pair is not None and self.pair.leader is self

    @property
    def twin(self) -> Sequence | None:
        """The twin; None where there is none yet."""
        return self.pair.twin if self.pair is not None and self.is_leader else None

    @property
    def held(self) -> bool:
        """True while it waits, in its slot, for its twin."""
        return self.state is State.HELD

    @property
    def sampled(self) -> int:
        """The number of its tokens, with those that the host has not read yet."""
        return len(self.tokens) + self.output.in_flight

    @property
    def due(self) -> bool:
        """True where the step that feeds its last token has to remake its twin."""
        if self.pair is None or not self.is_leader or self.held:
            return False
        contrast = self.spec.contrast
        return contrast is not None and contrast.due(self.sampled)

    @property
    def rows(self) -> int:
        """The number of slots that are taken, or must be kept free, for it."""
        return 2 if self.is_leader and (self.twin is None or self.twin.slot < 0) else 1

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def complete(self) -> bool:
        """True where its last token is sampled, as far as is known before that is read."""
        return self.done or self.sampled >= self.spec.max_tokens

    @property
    def can_fork(self) -> bool:
        """True while the source's prompt is still in its slot."""
        source = self.prefill.fork_of
        return source is not None and source.slot >= 0 and source.prefill.logits is not None

    @property
    def fed(self) -> int:
        """The number of generated tokens that went through the model."""
        return max(self.sampled - (not self.held), 0)

    @property
    def length(self) -> int:
        """Number of columns of the slot in use: the prompt and every generated token that was fed."""
        return self.computed + self.fed

    def wants(self, *signals: Signal) -> bool:
        """Return True where any of these signals has to be captured."""
        return not self.spec.signals.isdisjoint(signals)

    def restart(self) -> None:
        """Forget everything since the submission except the place in a pair, so that the prompt can run once more, alone."""
        self.state, self.slot, self.computed, self.captured = State.WAITING, -1, 0, {}
        prefill = self.prefill
        self.prefill = replace(prefill, fork_of=None, alone=True, reused=0, left=None, logits=None, states={})
        if self.pair is not None and self.is_leader:
            self.pair.held, self.pair.made = None, ()

    def release(self) -> None:
        """Free everything large that an ended sequence no longer needs."""
        self.prefill = PrefillState(reused=self.prefill.reused)
        self.matcher = None
        self.captured = {}
        if self.pair is not None and self.is_leader:
            self.pair.held = self.pair.prompt = None
        self.spec = replace(self.spec, prompt=replace(self.prompt, inputs={}, pictures=()), edit=None)
