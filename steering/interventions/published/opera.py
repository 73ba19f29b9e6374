"""OPERA, a row at a time: candidates are penalised by the attention that they would pay, and answers return to a summary.

Huang et al. 2024, "OPERA: Alleviating Hallucination in Multi-Modal Large Language Models via Over-Trust Penalty and
Retrospection-Allocation", arXiv 2311.17911, sections 3.2 and 3.3.

- Over-trust penalty: each of the likeliest tokens is run once more to see which tokens its row of the last layer's attention
  trusts. Weights are the maximum over heads, divided by their sum. Of the answer's tokens j, the product over all later rows
  of scale * weight, times 1e-7, is the trust in j; its maximum over j times `penalty` is subtracted from the candidate's
  logit. In an answer's first ten tokens the attention to images is added instead. Only candidates can be chosen.
- Retrospection: the token that is trusted most is noted for each step, the one most candidates agree on. Where one from the
  eleventh on was noted more than `threshold` times, the answer returns to the token after it, which is chosen again without
  its earlier choices and without a penalty. A token is chosen again as often as there are candidates, then the one before.

This follows the authors' code (github.com/shikiw/OPERA: opera_beam_search in generation/utils.py), with these differences:

- there are no beams, which that code always has: a row is a single answer, and a row in a batch knows no other one;
- a running answer is not shortened. A prelude answers the request, reads where it would return, and answers again with those
  tokens forbidden there, until nothing returns or `rollbacks` answers have, which that code does not bound. Neighbours keep
  running, and a client sees only the last answer. It needs greedy decoding or, for one answer, a seed, so that answers
  repeat; otherwise nothing returns;
- trust is of float32, and at most what float16 holds, to which that code rounds it, so that there a product below .3 is no
  trust, and the first of several infinite ones is the greatest;
- what was rejected behind the place to which an answer returns is allowed again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field

from steering.decoder.hooks import AttentionHook, Hook
from steering.devices import fill_slot, to_device
from steering.model.mllm import MLLM
from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.intervention import Prelude, Rounds
from steering.protocol.intervention_spec import InterventionSpec, Options
from steering.protocol.request import Request
from steering.protocol.sequence import Sequence
from steering.protocol.slots import Computed, DecodeBatch, LookAhead, Pool, Reuse, Slots

NAME = "opera"
MOST = 20
"""The most candidates."""
EARLY = 10
"""The number of first tokens that are judged by their attention to images, and to which nothing returns."""
LOG_TINY = math.log(1e-7)
LOG_MOST = math.log(torch.finfo(torch.float16).max)


class _OperaOptions(Options):
    """The options of both forms of OPERA."""

    path = (NAME,)
    needs_image = True

    scale: float = Field(50.0, gt=0, le=1000)
    candidates: int = Field(5, ge=1, le=MOST)
    penalty: float = Field(1.0, ge=0, le=100)
    threshold: int = Field(15, ge=1, le=10_000)
    rollbacks: int = Field(5, ge=0, le=50)


class Opera(_OperaOptions, Prelude):
    """Penalise tokens that trust few summary tokens, and return to these (OPERA, a row at a time).

    The `candidates` likeliest tokens lose `penalty` times the trust, products of `scale` times attention. Where one token
    was trusted most more than `threshold` times, the answer is given again from there, at most `rollbacks` times. The
    candidates of a step are rows of one pass, or a pass each beside other interventions. Huang et al. 2024, sections 3.2 and
    3.3, without beams. Raises RequestError for values out of range.
    """

    def rounds(self, mllm: MLLM, request: Request) -> Rounds:
        settings = {name: getattr(self, name) for name in _OperaOptions.model_fields}
        sampling = request.sampling
        repeats = sampling.greedy or (sampling.seed is not None and request.n == 1)
        short = sampling.max_tokens is not None and sampling.max_tokens <= EARLY + self.threshold
        if not self.rollbacks or not repeats or short:
            return OperaSteering(**settings, returns=repeats or not self.rollbacks)
        history = Retrospection(self.candidates, self.threshold)
        for _ in range(self.rollbacks):
            steering = OperaSteering(**settings, excluded=history.excluded, measures=True)
            (result,) = yield [_measuring(request, self, steering)]
            (choice,) = result.choices
            assert choice.applied is not None
            report = choice.applied[NAME]
            if not history.returned(report["trusted"], choice.token_ids, report["allowed"]):
                break
        return OperaSteering(**settings, excluded=history.excluded)


class OperaSteering(_OperaOptions):
    """OPERA with the tokens that are forbidden where the answer returned to.

    excluded: by number of the answer's token, in order. returns: False where answers do not repeat, so that nothing returns.
    measures: True where its report has, for the prelude, how many tokens each one was chosen from.
    """

    excluded: tuple[tuple[int, tuple[int, ...]], ...] = Field((), exclude=True)
    returns: bool = Field(True, exclude=True)
    measures: bool = Field(False, exclude=True)

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings, the rollbacks, and the token that was trusted most at each step.

        measured: by token of the answer, the number of the token that was trusted most, -1 for none; how many tokens are not
        the likeliest ones; and by token, how many were allowed.
        """
        trusted, changed, allowed = measured
        rolled_back = [{"token": place, "rejected": list(tokens)} for place, tokens in self.excluded]
        return {
            **self.settings(),
            "changed": changed,
            "rolled_back": rolled_back if self.returns else None,
            "trusted": [None if place < 0 else place for place in trusted],
            **({"allowed": allowed} if self.measures else {}),
        }

    def brief(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report with the number of rollbacks, without the tokens that were trusted."""
        rolled_back = report["rolled_back"]
        count = None if rolled_back is None else len(rolled_back)
        return {name: value for name, value in report.items() if name != "trusted"} | {"rolled_back": count}


class Retrospection:
    """The returns of an answer that is given again and again. excluded: as in `OperaSteering`."""

    def __init__(self, candidates: int, threshold: int):
        self._candidates, self._threshold = candidates, threshold
        self._excluded: dict[int, tuple[int, ...]] = {}
        self._times: dict[int, int] = defaultdict(int)

    @property
    def excluded(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple(sorted(self._excluded.items()))

    def returned(self, trusted: Rows[int | None], tokens: Rows[int], allowed: Rows[int]) -> bool:
        """Return whether the answer returns, and note where to.

        trusted: by token, the number of the token that was trusted most. tokens: the answer. allowed: by token, how many it
        was chosen from, those included that were rejected there. A place without another token is none to return to.
        """

        def open_to_others(target: int) -> bool:
            return allowed[target] > len(self._excluded.get(target, ())) + 1

        counts: dict[int, int] = defaultdict(int)
        for number, place in enumerate(trusted):
            if place is None:
                continue
            counts[place] += 1
            targets = [
                target
                for target in (place + 1, place)
                if self._times[target] < self._candidates and (target >= number or open_to_others(target))
            ]
            if counts[place] <= self._threshold or place < EARLY or not targets or targets[0] >= number:
                continue
            target = targets[0]
            self._times[target] += 1
            earlier = {at: rejected for at, rejected in self._excluded.items() if at <= target}
            self._excluded = {**earlier, target: (*earlier.get(target, ()), tokens[target])}
            return True
        return False


def _measuring(request: Request, prelude: Prelude, steering: InterventionSpec) -> Request:
    """Return the request that answers once under what was decided so far."""
    interventions = [steering if intervention is prelude else intervention for intervention in request.asked.values()]
    decided = [intervention for intervention in interventions if not isinstance(intervention, Prelude)]
    return replace(request, interventions=decided, n=1, baseline=False, diagnose=None, states=False, divergence=False)


class OperaRows(AttentionHook):
    """Reads the last layer's attention of one token of each row.

    `trusted`: (rows, columns), the maximum over heads, divided by its sum.
    """

    trusted: torch.Tensor

    def __init__(self, mllm: MLLM, rows: int):
        self.asked = torch.zeros(rows, 1, 1, 1, dtype=torch.bool, device=mllm.device)  # it changes no weights
        self.queries = torch.zeros(rows, 1, dtype=torch.int64, device=mllm.device)  # behind a prompt
        self._mllm = mllm

    def reads(self, layer: int) -> bool:
        return layer == self._mllm.attention_layers[-1]

    def read(self, layer: int, weights: torch.Tensor, value: torch.Tensor) -> None:
        highest = weights[:, :, 0].float().amax(1)[..., None]  # (rows, columns, 1), of this rank's heads
        highest = self._mllm.ranks.joined(highest).amax(-1)
        self.trusted = (highest / highest.sum(-1, keepdim=True)).to(self._mllm.device)


class OperaSlots(Slots):
    """The trust of every slot, and the candidates of its next token.

    start: (slots, 1), the column of the answer's first token. numbers: (slots, 2), the logarithm of the scale, and the
    penalty. count: (slots, 1), the number of candidates. images: (slots, length), 1 on their columns. trust: (slots,
    length), by column, the logarithm of the product so far. tokens, scores: (slots, candidates), of the next token. looked:
    (slots,), the number of that token in the answer. next_place: (slots,), the token of the answer that is trusted most by
    it. trusted: (slots, length), the same by token of the answer. changed: (slots, length) bool. allowed: (slots, length),
    how many tokens the grammar and a contrast allow.
    """

    def __init__(self, name: str, pool: Pool):
        super().__init__(name, pool)
        slots, length, device = pool.slots, pool.length, pool.device
        most = min(MOST, pool.mllm.vocab_size)
        self.start = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(slots, 2, device=device)
        self.count = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self.images = torch.zeros(slots, length, device=device)
        self.trust = torch.zeros(slots, length, device=device)
        self.tokens = torch.zeros(slots, most, dtype=torch.int64, device=device)
        self.scores = torch.zeros(slots, most, device=device)
        self.looked = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.next_place = torch.zeros(slots, dtype=torch.int64, device=device)
        self.trusted = torch.full((slots, length), -1, dtype=torch.int64, device=device)
        self.allowed = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self.changed = torch.zeros(slots, length, dtype=torch.bool, device=device)

    def place(self, sequence: Sequence) -> None:
        opera, slot, spans = _options(sequence), sequence.slot, sequence.prompt.layout.spans
        if opera is None:
            return  # the old values are read by rows that ask for it alone
        fill_slot(self.start, slot, sequence.prompt.length)
        fill_slot(self.count, slot, opera.candidates)
        fill_slot(self.looked, slot, -1)
        self.numbers[slot] = to_device(torch.tensor([math.log(opera.scale), opera.penalty]), self.numbers)
        self.trust[slot], self.trusted[slot], self.changed[slot], self.images[slot] = 0, -1, False, 0
        self.images[slot, : len(spans)] = to_device((spans >= FIRST_IMAGE).float(), self.images)

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length)  # nothing is changed

    def acts(self, sequences: list[Sequence]) -> bool:
        return bool(_asking(sequences))

    def decode(self, batch: DecodeBatch) -> OperaRows | None:
        return OperaRows(self.pool.mllm, len(batch.sequences)) if _asking(batch.sequences) else None

    def look_ahead(self, ahead: LookAhead) -> None:
        # Behind a decode, the logits of an answer that waits for a twin, or is due for one, will be others.
        asking = [
            (row, opera)
            for row, opera in _asking(ahead.sequences)
            if ahead.hook is None or not (ahead.sequences[row].held or ahead.sequences[row].due)
        ]
        if not asking:
            return
        positions, device = ahead.positions, ahead.logits.device
        most = max(opera.candidates for _, opera in asking)
        rows = [row for row, _ in asking]
        index = to_device(torch.tensor(rows), device)
        slots, full = index + ahead.rows.start, ahead.logits[index]
        tokens = self.pool.mllm.ranks.agreed(ahead.logits.topk(most, -1).indices)
        trust = self.trust[slots]
        if isinstance(ahead.hook, OperaRows):
            trust = self._added(ahead.rows, positions, ahead.hook)[index]
        weights = self._weights(ahead, rows, tokens, index)  # (asking, candidates, length)
        tokens = tokens[index]
        number = to_device(torch.tensor([ahead.sequences[row].sampled for row in rows]), device)  # of the next token
        grown = self._with_rows(slots, trust, weights, positions[index] + 1)
        highest, place = grown.max(-1)
        place = torch.where(highest == -torch.inf, self.start[slots], place)  # all products are 0
        score = (highest + LOG_TINY).clamp(max=LOG_MOST).exp()
        to_images = (weights * self.images[slots][:, None]).sum(-1)
        penalties = torch.where(number[:, None] < EARLY, -to_images, score)
        likeliest = full.gather(1, tokens)
        # A token that a grammar or a contrast rules out is no candidate, however few there are.
        counts = (torch.arange(most, device=device) < self.count[slots]) & (likeliest > -torch.inf)
        scores = (likeliest - self.numbers[slots, 1:] * penalties).masked_fill(~counts, -torch.inf)
        # Beyond the candidates the first one is repeated, so that no token is scattered with two scores.
        spare = torch.arange(self.tokens.shape[1], device=device).clamp(max=most) % most
        self.tokens[slots], self.scores[slots] = tokens[:, spare], scores[:, spare]
        self.next_place[slots] = _mode(place, counts) - self.start[slots, 0]
        self.looked[slots] = number

    def _weights(self, ahead: LookAhead, rows: list[int], tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the attention of candidates (asking, candidates, length), of tokens (all rows, candidates).

        rows, index: the asking ones, twice.
        """
        mllm, most = self.pool.mllm, tokens.shape[1]
        together = OperaRows(mllm, len(rows) * most)
        if ahead.run_together(rows, tokens[index], together):
            return self._padded(together.trusted).view(len(rows), most, -1)
        weights = []
        for candidate in range(most):
            hook = OperaRows(mllm, len(ahead.sequences))
            ahead.run(tokens[:, candidate], hook)
            weights.append(self._padded(hook.trusted)[index])
        return torch.stack(weights, 1)

    def logits(self, sequences: list[Sequence], slots: slice | torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        asking = _asking(sequences)
        if not asking:
            return logits
        places = torch.tensor([[row, sequences[row].slot, len(sequences[row].tokens)] for row, _ in asking])
        at, slot, token = to_device(places, logits.device).unbind(1)
        full = logits[at]
        # A token that was not looked ahead at, and one to which the answer returned, is chosen by the plain logits.
        excluded = [dict(opera.excluded).get(len(sequences[row].tokens), ()) for row, opera in asking]
        plain = to_device(torch.tensor([bool(rejected) for rejected in excluded]), logits.device)
        penalised = torch.full_like(full, -torch.inf).scatter(1, self.tokens[slot], self.scores[slot])
        looked = self.looked[slot] == token
        chosen = torch.where((looked & ~plain)[:, None], penalised.masked_fill(full == -torch.inf, -torch.inf), full)
        rejected = [(row, token_id) for row, tokens in enumerate(excluded) for token_id in tokens]
        if rejected:
            row, token_id = to_device(torch.tensor(rejected), logits.device).unbind(1)
            chosen[row, token_id] = -torch.inf
        # An answer that rounding made another than the one that returned must not be left without any token.
        chosen = torch.where((chosen > -torch.inf).any(-1, keepdim=True), chosen, full)
        self.trusted[slot, token] = torch.where(looked, self.next_place[slot], -1)
        self.allowed[slot, token] = (full > -torch.inf).sum(-1)
        self.changed[slot, token] = chosen.argmax(-1) != full.argmax(-1)
        return logits.index_copy(0, at, chosen)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        if isinstance(hook, OperaRows):
            trust = self.trust[batch.rows]
            added = self._added(batch.rows, batch.positions, hook)
            self.trust[batch.rows] = torch.where(batch.active[:, 0] > 0, added, trust)

    def take(self, sequence: Sequence) -> tuple[list[int], int, list[int]] | None:
        if _options(sequence) is None:
            return None
        slot, count = sequence.slot, len(sequence.tokens)
        changed = int(self.changed[slot, :count].sum())
        return self.trusted[slot, :count].tolist(), changed, self.allowed[slot, :count].tolist()

    def _added(self, rows: slice, positions: torch.Tensor, hook: OperaRows) -> torch.Tensor:
        """Return the trust (rows, length) with a decode's own rows of attention. positions: (rows,), the tokens' columns."""
        added = self._with_rows(rows, self.trust[rows], self._padded(hook.trusted)[:, None], positions)[:, 0]
        return torch.where(self._inside(rows, positions), added, 0.0)

    def _inside(self, slots: slice | torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return which columns are of the answer up to a position (n,), (n, length) bool."""
        columns = torch.arange(self.pool.length, device=position.device)
        return (columns >= self.start[slots]) & (columns <= position[:, None])

    def _with_rows(
        self, slots: slice | torch.Tensor, trust: torch.Tensor, weights: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """Return the trust after each of several rows of attention (n, rows, length), -inf outside of the answer.

        trust: (n, length). weights: (n, rows, length). position: (n,), the rows' own column.
        """
        grown = trust[:, None] + weights.log() + self.numbers[slots, None, :1]
        return grown.masked_fill(~self._inside(slots, position)[:, None], -torch.inf)

    def _padded(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights (rows, columns) as (rows, length)."""
        return torch.nn.functional.pad(weights, (0, self.pool.length - weights.shape[1]))


def _mode(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the commonest of each row's values, (rows, n) both, where `counts`; the least of several."""
    alike = (values[:, :, None] == values[:, None]) & counts[:, None] & counts[:, :, None]
    times = alike.sum(-1)
    commonest = times == times.amax(-1, keepdim=True)
    return values.masked_fill(~(commonest & counts), torch.iinfo(torch.int64).max).amin(-1)


def _asking(sequences: list[Sequence]) -> list[tuple[int, OperaSteering]]:
    """Return the rows that ask for OPERA, except twins, with their options."""
    return [
        (row, opera)
        for row, sequence in enumerate(sequences)
        if not sequence.is_twin and (opera := _options(sequence)) is not None
    ]


def _options(sequence: Sequence) -> OperaSteering | None:
    opera = sequence.spec.asked.get(NAME)
    return opera if isinstance(opera, OperaSteering) else None
