"""One answer in the making: its prompt, its settings, what was generated and measured so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from steering.diagnostics.options import Diagnose
from steering.embedded import Embedded
from steering.interventions.contrast import Contrast, Pai, Rule
from steering.interventions.generate import Generate, Mask
from steering.interventions.sage import Sage, SageReadings
from steering.interventions.see import See
from steering.interventions.steer import Steer, applied
from steering.interventions.think import Think
from steering.layout import Prompt
from steering.request import Sampling, TokenLogprob
from steering.text import TextStream


@dataclass
class Readings:
    """What one sequence's readouts are made of, on the CPU; spans are numbered as in `layout`, patches image by image.

    sums: (layers, spans), attention, mean over heads, summed over `rows`. modality: the same over `modality_rows`. output:
    how many generated tokens were fed. decay: (steps, layers, 3), shares of vision, system and user text at each generated
    token. anchor: (layers, spans), attention summed over the last image's rows. patches: (layers, patches), as `sums` by
    image token. tam: (tokens, patches), of the tokens that are part of the answer. residual: (layers, readouts), summed over
    the rows that were asked for. neurons: (layers,), the share of active ones. states: (2, layers, d), as `Choice` has them.
    """

    sums: torch.Tensor
    rows: RowCounts
    modality: torch.Tensor
    modality_rows: RowCounts
    output: int
    decay: torch.Tensor
    anchor: torch.Tensor
    patches: torch.Tensor
    tam: torch.Tensor | None
    residual: torch.Tensor
    neurons: torch.Tensor
    states: torch.Tensor | None


class RowCounts(NamedTuple):
    """How many query rows of each kind an average of attention was taken over: the question's, those of generated tokens,
    and the prompt's last one, which stands in where there are no others."""

    question: int
    output: int
    last: int

    @classmethod
    def of(cls, question: int, output: int) -> RowCounts:
        return cls(question, output, int(question + output == 0))


@dataclass(frozen=True)
class Measured:
    """What a prompt left behind, for sequences that copy it: of its slot `ThinkSlots.measured`, `ReadoutSlots.patches` (the
    prompt's columns), `ResidualSlots.sums` and `states`; its text states."""

    think: torch.Tensor
    patches: torch.Tensor
    residual: torch.Tensor
    states: torch.Tensor
    text_states: tuple[torch.Tensor, ...]


@dataclass
class Captured:
    """What a sequence's forward passes left behind outside of its slot; one that runs anew begins without any of it.

    sums: (layers, groups, spans), attention of the prompt's rows by the groups of `PrefillCapture`. last_sums: (layers,
    spans) and last_patches: (layers, columns), that of its last row. norms: per steered layer (2, classes). image_states
    and text_states: (k, d) each, normalised, after the last layer, of image tokens, and of the user's text and the rows
    that generate. states: (layers, d). divergence: (layers, prompt tokens). scores: chunk by chunk, the log-probabilities
    of the reply's tokens. next_logprobs, prompt_logits: (vocabulary,).
    """

    sums: torch.Tensor | None = None
    last_sums: torch.Tensor | None = None
    last_patches: torch.Tensor | None = None
    norms: dict[int, torch.Tensor] = field(default_factory=dict)
    image_states: list[torch.Tensor] = field(default_factory=list)
    text_states: list[torch.Tensor] = field(default_factory=list)
    states: torch.Tensor | None = None
    divergence: torch.Tensor | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    next_logprobs: torch.Tensor | None = None
    prompt_logits: torch.Tensor | None = None
    prompt_measured: Measured | None = None


@dataclass(eq=False)
class Sequence:
    """Lives from submission to its last token; the scheduler gives it a slot, the runner fills in what it reads."""

    prompt: Prompt
    sampling: Sampling
    max_tokens: int
    seed: int
    text: TextStream
    notify: Callable[[Sequence, str, list[TokenLogprob]], None]
    steering: tuple[Steer, ...] = ()
    sage: Sage | None = None
    contrast: Contrast | None = None
    twin_prompt: Prompt | None = None  # of a published contrast; Generate's depends on what the model says
    thresholds: torch.Tensor | None = None  # (layers,), of the divergence where it thinks
    diagnose: Diagnose | None = None
    wants_states: bool = False
    state_position: int = -1  # counted from the prompt's end
    wants_divergence: bool = False
    forced: tuple[int, ...] = ()
    wants_scores: bool = False
    fork_of: Sequence | None = None  # a sequence with the same prompt and interventions, whose prefill can be copied
    expects_forks: bool = False
    leader: Sequence | None = None  # the sequence whose tokens this one repeats, as its contrast
    replay: tuple[int, ...] = ()  # of a twin that joins late: what was generated before
    alone: bool = False  # prefill it in a batch of its own
    waited: bool = False  # in the place of a request that it depends on (see `Turn`)

    slot: int = -1
    computed: int = 0
    embedded: Embedded | None = None
    rope_delta: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    error: BaseException | None = None
    cancelled: bool = False

    twin: Sequence | None = None
    held_logits: torch.Tensor | None = None  # of the next token, while the twin's are not known
    masks: tuple[Mask, ...] = ()  # of a sequence that Generate contrasts; a twin has its own one
    changed: int = 0  # tokens that the contrast changed
    captured: Captured = field(default_factory=Captured)
    readings: Readings | None = None
    sage_readings: SageReadings | None = None

    @property
    def see(self) -> See | None:
        return None if self.sage is None else self.sage.see

    @property
    def think(self) -> Think | None:
        return None if self.sage is None else self.sage.think

    @property
    def generate(self) -> Generate | None:
        return None if self.sage is None else self.sage.generate

    @property
    def pai(self) -> Pai | None:
        return self.contrast if isinstance(self.contrast, Pai) else None

    @property
    def rule(self) -> Rule | None:
        """How its logits are combined with its twin's, None where it has none."""
        chosen = self.generate or self.contrast
        return None if chosen is None else chosen.rule

    @property
    def paused(self) -> bool:
        """Whether it waits, in its slot, for its twin."""
        return self.held_logits is not None

    @property
    def mask_due(self) -> bool:
        """Whether the step that feeds its last token is to rebuild the mask."""
        refresh = 0 if self.generate is None else self.generate.refresh
        return refresh > 0 and not self.paused and len(self.tokens) > 0 and len(self.tokens) % refresh == 0

    @property
    def rows(self) -> int:
        """How many slots are taken, or must be kept free, for it."""
        return 2 if self.rule is not None and (self.twin is None or self.twin.slot < 0) else 1

    @property
    def wants_image_states(self) -> bool:
        """Whether the states of image tokens are kept: for Generate's maps or for those of diagnostics."""
        return self.generate is not None or self.wants_activations

    @property
    def wants_activations(self) -> bool:
        return self.diagnose is not None and self.diagnose.wants_activations

    @property
    def wants_drift(self) -> bool:
        return self.diagnose is not None and "drift" in self.diagnose.include

    @property
    def wants_text_states(self) -> bool:
        return self.diagnose is not None and self.diagnose.wants_activations and self.diagnose.causal

    @property
    def wants_shares(self) -> bool:
        """Whether attention is to be summed by span: for diagnostics, the decay of See or the maps of Generate."""
        return self.diagnose is not None or self.see is not None or self.generate is not None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.cancelled

    @property
    def can_fork(self) -> bool:
        """Whether the source's prompt is still in its slot."""
        return self.fork_of is not None and self.fork_of.slot >= 0 and self.fork_of.captured.prompt_logits is not None

    @property
    def length(self) -> int:
        """Columns of the slot in use: the prompt and every generated token, but for the last where it was not fed yet."""
        return self.computed + max(len(self.tokens) - (not self.paused), 0)

    def restart(self) -> None:
        """Forget everything since the submission but the place in a pair, so that the prompt can run once more, alone."""
        self.slot, self.computed, self.alone = -1, 0, True
        self.fork_of = self.held_logits = None
        self.captured = Captured()
        if self.leader is None:
            self.masks = ()

    def release(self) -> None:
        """Let go of everything large that an ended sequence no longer needs; the layout stays for its readings."""
        self.embedded = self.held_logits = self.twin_prompt = None
        kept = self.captured
        self.captured = Captured(states=kept.states, divergence=kept.divergence, next_logprobs=kept.next_logprobs)
        self.captured.norms, self.captured.scores = kept.norms, kept.scores
        self.prompt = replace(self.prompt, inputs={}, pictures=())

    def applied(self) -> dict[str, object] | None:
        """The `applied` report, None when no intervention was asked for."""
        report: dict[str, object] = {}
        if self.steering:
            fed = max(len(self.tokens) - 1, 0)
            report["steering"] = [applied(steer, self.captured.norms, fed) for steer in self.steering]
        if self.sage is not None and self.sage_readings is not None:
            report["sage"] = self.sage.report(self.sage_readings)
        if self.contrast is not None:
            report["contrast"] = self.contrast.report(self.changed)
        return report or None
