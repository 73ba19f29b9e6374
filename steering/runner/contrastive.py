"""Contrastive decoding: a sequence's logits against those of its twin, which repeats its tokens on another prompt.

A leader whose prompt is prefilled waits in its slot, its logits held, while its twin's prompt runs; from then on both decode
side by side. A leader whose twin is remade waits once more, while the new twin is prefilled with the prompt and fed the
answer so far (replay).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from steering.devices import fill_slot, to_device
from steering.protocol.intervention_spec import Rule
from steering.protocol.sequence import Pair, PrefillState, Sequence, Spec, State
from steering.protocol.slots import Pool, PrefillChunk, Slots

LOWEST = torch.finfo(torch.float32).min
"""The least logit of a possible token."""
STEEPEST = 60.0
"""The largest exponent of a growing weight, far from float32's limit."""
REPLAY_ROWS = 128
"""Generated tokens that a late twin is fed at once: some interventions need the attention weights of all of them."""


@dataclass(frozen=True)
class TwinReport:
    """The report of contrasting one answer.

    made: what its twins were made from, in order. changed: the number of tokens that greedy decoding without it would have
    changed. rising: the shares of the vocabulary, mean over tokens, whose logit, and whose log-probability, exceeds the
    twin's; None without a ReLU, which alone tells a rise from a fall.
    """

    made: tuple[Any, ...]
    changed: int
    rising: tuple[float, float] | None = None


class Rules(NamedTuple):
    """The `Rule` of each of some rows.

    weight: (rows, 1). relu: (rows, 1) bool, or a bool for all rows. plausible: (rows, 1), its logarithm. scale: (rows, 1).
    growth: (rows, 1), with `first`, (rows, 1). below: (rows, 1), its logarithm. normalised: (rows, 1), 1 where
    log-probabilities are compared. All but the first two are None where no row has any.
    """

    weight: torch.Tensor
    relu: torch.Tensor | bool
    plausible: torch.Tensor | None
    scale: torch.Tensor | None = None
    growth: torch.Tensor | None = None
    first: torch.Tensor | None = None
    below: torch.Tensor | None = None
    normalised: torch.Tensor | None = None

    @classmethod
    def of(cls, rules: Iterable[Rule], device: torch.device) -> Rules:
        """Return the rules of as many rows."""
        columns = [torch.tensor(values)[:, None] for values in zip(*rules, strict=True)]
        weight, relu, plausible, scale, growth, first, below, normalised = columns  # the fields of `Rule`

        def unless(none: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
            return None if bool(none.all()) else to_device(values, device)

        alike, steady = len(relu.unique()) == 1, growth == 0
        return cls(
            to_device(weight, device),
            bool(relu[0]) if alike else to_device(relu, device),
            unless(plausible == 0, plausible.log()),
            unless(scale == 1, scale),
            unless(steady, growth),
            unless(steady, first.float()),
            unless(below.isinf(), below.log()),
            unless(~normalised, normalised.float()),
        )

    def weights(self, full: torch.Tensor, tokens: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the rows' weights, (rows, 1).

        full: (rows, vocabulary). tokens: returns (rows, 1) on the CPU, how many tokens each answer has so far.
        """
        weight = self.weight
        if self.growth is not None and self.first is not None:
            steps = to_device(tokens().float(), weight.device) + self.first
            weight = weight + (self.growth * steps).clamp_(max=STEEPEST).expm1()
        if self.below is not None:
            likeliest = full.amax(-1, keepdim=True) - full.logsumexp(-1, keepdim=True)
            weight = torch.where(likeliest < self.below, weight, 0.0)
        return weight


def no_tokens() -> torch.Tensor:
    """Return that answers have no token yet, (1, 1)."""
    return torch.zeros(1, 1)


def contrasted(
    full: torch.Tensor, twin: torch.Tensor, rules: Rules, tokens: Callable[[], torch.Tensor] = no_tokens
) -> torch.Tensor:
    """Return the logits (rows, vocabulary) combined by the rows' rules, in few calls, because a step is short.

    full, twin: (rows, vocabulary) logits. Impossible tokens stay impossible. tokens: returns how many tokens each row's
    answer has, (rows, 1) on the CPU.
    """
    difference = full - twin
    if rules.normalised is not None:
        difference -= rules.normalised * _shift(full, twin)
    least: torch.Tensor | float = LOWEST
    if rules.relu is True:
        difference.relu_()
    elif rules.relu is not False:
        difference = torch.where(rules.relu, difference.relu(), difference)
    scaled = full if rules.scale is None else full * rules.scale
    combined = torch.addcmul(scaled, rules.weights(full, tokens), difference)
    if rules.plausible is not None:
        least = (full.amax(-1, keepdim=True) + rules.plausible).clamp_(min=LOWEST)
    return combined.masked_fill_(full < least, -torch.inf)


def _shift(full: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
    """Return the part (rows, 1) of the difference of logits that all tokens share, which no probability depends on."""
    return full.logsumexp(-1, keepdim=True) - twin.logsumexp(-1, keepdim=True)


class ContrastSlots(Slots):
    """Counts the tokens of every slot that the contrast changed, and what rises above the twin.

    changed: (slots,). raised: (slots, 3), the number of compared tokens, and the sums over them of the shares of the
    vocabulary whose logit, and whose log-probability, exceeds the twin's.
    """

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        self.changed = torch.zeros(pool.slots, dtype=torch.int64, device=pool.device)
        self.raised = torch.zeros(pool.slots, 3, device=pool.device)

    def holds(self, sequence: Sequence) -> bool:
        return sequence.spec.contrast is not None

    def place(self, sequence: Sequence) -> None:
        fill_slot(self.changed, sequence.slot, 0)
        fill_slot(self.raised, sequence.slot, 0)

    def count(self, slots: torch.Tensor, full: torch.Tensor, combined: torch.Tensor) -> None:
        """Count where the likeliest token changed; full, combined: logits (rows, vocabulary) of some slots."""
        self.changed.index_add_(0, slots, (combined.argmax(-1) != full.argmax(-1)).long())

    def compare(self, slots: torch.Tensor, full: torch.Tensor, twin: torch.Tensor) -> None:
        """Add up what rises. full, twin: logits (rows, vocabulary) of some slots; impossible tokens never rise."""
        difference = full - twin
        raw, normalised = ((values > 0).float().mean(-1) for values in (difference, difference - _shift(full, twin)))
        self.raised.index_add_(0, slots, torch.stack([torch.ones_like(raw), raw, normalised], -1))


class _Pairs(NamedTuple):
    """A batch of leaders, each with its slot and its twin's. leaders, twins: (pairs,), these slots."""

    of: list[tuple[Sequence, int, int]]
    leaders: torch.Tensor
    twins: torch.Tensor
    rules: Rules


@dataclass(frozen=True)
class Combined:
    """Logits (rows, vocabulary) for the sampler.

    leaders, twins: (pairs,) slots of the combined ones, None where there are none; full, contrasted: the leaders' logits
    before and after. twin: their twins' logits, where any is compared by what rises.
    """

    logits: torch.Tensor
    leaders: torch.Tensor | None = None
    twins: torch.Tensor | None = None
    full: torch.Tensor | None = None
    contrasted: torch.Tensor | None = None
    twin: torch.Tensor | None = None


class ContrastiveBranches:
    """Pairs sequences with their twins. `changes` counts; `queue` prefills a twin, `dismiss` ends one."""

    def __init__(self, changes: ContrastSlots, queue: Callable[[Sequence], None], dismiss: Callable[[Sequence], None]):
        self._changes = changes
        self._queue = queue
        self._dismiss = dismiss
        self._pairs: _Pairs | None = None  # of the latest decode: the next one has mostly the same

    # -- pairing, waiting, renewal -------------------------------------------------------------------------------------

    def pair(self, leader: Sequence) -> None:
        """Make the twin of a waiting leader and queue it, after dismissing an earlier twin."""
        assert leader.pair is not None
        if leader.twin is not None:
            self._dismiss(leader.twin)
        leader.pair.twin = twin = _twin(leader, leader.pair)
        self._queue(twin)

    def hold(self, leader: Sequence, logits: torch.Tensor) -> None:
        """Let a leader wait for its new twin; `logits` (vocabulary,) are its next ones."""
        assert leader.pair is not None
        leader.pair.held, leader.state = logits, State.HELD

    def resumed(self, twin: Sequence, logits: torch.Tensor) -> tuple[Sequence, torch.Tensor] | None:
        """Return the leader that waited for a prefilled twin, and its next logits (vocabulary,).

        None where it no longer waits. logits: (vocabulary,), the twin's.
        """
        assert twin.pair is not None
        leader, branch = twin.pair.leader, twin.pair.held
        if not leader.held or branch is None:
            return None
        twin.pair.compared = logits if _rule(leader).relu else None
        rules = Rules.of([_rule(leader)], logits.device)
        return leader, contrasted(branch[None], logits[None], rules, lambda: _tokens([leader]))[0]

    def end_wait(self, leader: Sequence, logits: torch.Tensor) -> None:
        """Let a leader continue, once its token is sampled from the `logits` (vocabulary,) that `resumed` returned."""
        assert leader.pair is not None
        assert leader.pair.held is not None
        slot = to_device(torch.tensor([leader.slot]), logits.device)
        self._changes.count(slot, leader.pair.held[None], logits[None])
        if leader.pair.compared is not None:
            self._changes.compare(slot, leader.pair.held[None], leader.pair.compared[None])
        leader.pair.held, leader.pair.compared, leader.state = None, None, State.RUNNING

    # -- in a decode ---------------------------------------------------------------------------------------------------

    def combine(self, running: list[Sequence], logits: torch.Tensor) -> Combined:
        """Combine the logits (rows, vocabulary) of running leaders with those of their twins; row i is slot i.

        A leader that waits, or is due for another twin, is left as it is.
        """
        led = [leader for leader in running if leader.pair is not None]
        paired = [
            (leader, leader.slot, leader.twin.slot)
            for leader in led
            if leader.twin is not None and not leader.held and not leader.due
        ]
        if not paired:
            self._pairs = None
            return Combined(logits)
        if self._pairs is None or self._pairs.of != paired:
            slots = to_device(torch.tensor([of[1:] for of in paired]), logits.device)
            leaders, twins = slots.unbind(1)
            rules = Rules.of([_rule(leader) for leader, *_ in paired], logits.device)
            self._pairs = _Pairs(paired, leaders, twins, rules)
        _, leaders, twins, rules = self._pairs
        full, twin = logits.index_select(0, leaders), logits.index_select(0, twins)
        combined = contrasted(full, twin, rules, lambda: _tokens(leader for leader, *_ in paired))
        compared = None if rules.relu is False else twin
        return Combined(logits.index_copy(0, leaders, combined), leaders, twins, full, combined, compared)

    def record(self, combined: Combined) -> None:
        """Count the tokens that the contrast changed in a decode that counts."""
        if combined.leaders is not None and combined.full is not None and combined.contrasted is not None:
            self._changes.count(combined.leaders, combined.full, combined.contrasted)
            if combined.twin is not None:
                self._changes.compare(combined.leaders, combined.full, combined.twin)

    def take(self, leader: Sequence) -> TwinReport:
        """Return the report of a finished answer."""
        assert leader.pair is not None
        rising = None
        if _rule(leader).relu:
            tokens, raw, normalised = self._changes.raised[leader.slot].tolist()
            rising = (raw / tokens, normalised / tokens) if tokens else None
        return TwinReport(leader.pair.made, int(self._changes.changed[leader.slot]), rising)


def replayed(twin: Sequence, budget: int) -> tuple[PrefillChunk, tuple[int, ...]]:
    """Return the next chunk, of at most `budget` rows, of a late twin's replay, and its tokens."""
    fed = twin.computed - twin.prompt.length
    tokens = twin.prefill.replay[fed : fed + min(budget, REPLAY_ROWS)]
    complete = fed + len(tokens) == len(twin.prefill.replay)
    return PrefillChunk([twin], [twin.computed], [len(tokens)], complete, replay=True), tokens


def rows_of(sequences: Iterable[Sequence]) -> Iterable[Sequence]:
    """Yield each sequence and its twin, whose tokens are the same."""
    for sequence in sequences:
        yield sequence
        if sequence.twin is not None:
            yield sequence.twin


def _rule(leader: Sequence) -> Rule:
    assert leader.spec.contrast is not None
    return leader.spec.contrast.rule


def _tokens(leaders: Iterable[Sequence]) -> torch.Tensor:
    """Return how many tokens each answer has, (leaders, 1), with those that the host has not read."""
    return torch.tensor([[leader.sampled] for leader in leaders])


def _twin(leader: Sequence, pair: Pair) -> Sequence:
    """Return the sequence that repeats a leader's tokens.

    Its prompt is made from the latest entry of `made`, or is the prompt of its contrast.
    """
    spec, late = leader.spec, bool(leader.tokens)
    prompt, edit = pair.prompt or spec.prompt, None
    if pair.made:
        prompt, edit = pair.made[-1].occluded(spec.prompt)
    interventions = {name: intervention for name, intervention in spec.asked.items() if not intervention.twin}
    twin_spec = Spec(
        prompt, max_tokens=spec.max_tokens, asked=interventions, edit=edit, salt=spec.salt, settled=spec.settled
    )
    source = None if late or leader.prefill.fork_of is None else leader.prefill.fork_of.twin
    prefill = PrefillState(
        source, leader.prefill.expects_forks and not late, late, tuple(leader.tokens) if late else ()
    )
    return Sequence(twin_spec, prefill=prefill, pair=pair)
