"""Steps of an engine in simulated time: the engine's own scheduler and budget, and passes with given costs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from benchmarks.step_budget.prices import PICTURE, Arrival, Machine
from steering.core.budget import Allowance, StepBudget, StepTotals
from steering.core.scheduler import Scheduler
from steering.protocol.sequence import Sequence, Spec


class FixedChunk(StepBudget):
    """A budget of a fixed number of prompt tokens per step, whatever a pass costs.

    It takes as many pictures, whose costs it knows, as the bound leaves time for.
    """

    def __init__(self, chunk: int, machine: Machine, gap: float):
        super().__init__(chunk)
        self._chunk, self._machine, self._bound = chunk, machine, gap

    def allowance(self, rows: int) -> Allowance:
        """Return the same allowance at each step."""
        if not rows:
            return Allowance(most=self._chunk)
        seconds_left = self._bound - self._machine.prefill(self._chunk) - self._machine.decoding(rows)
        encoding = self._machine.picture, self._machine.picture_token
        return Allowance(seconds_left, self._chunk, self._chunk, 0.0, 0.0, *encoding, self._machine.row)

    def holds_back(self, rows: int, prompts: int, tokens: int, now: float) -> bool:
        """Return False: no request waits for others."""
        return False


@dataclass
class Seen:
    """The history of a request, in seconds of the simulation.

    ready: when there was a slot for it; due: when the engine would have run its prompt and all before it, in the largest
    passes that keep the bound.
    """

    asked: Arrival
    ready: float = math.inf
    due: float = math.inf
    first: float = math.inf
    gaps: list[float] = field(default_factory=list)
    last: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """The figures of a run.

    They are tokens a second, percentiles of the gap between tokens and of the time to the first one, and the longest wait
    from when a slot was free, relative to the time of the work before it.
    """

    rate: float
    gap_p99: float
    first_p50: float
    first_p99: float
    wait: float


class Simulation:
    """Answers requests on a machine, where each pass takes slightly more or less than its cost."""

    def __init__(self, machine: Machine, budget: StepBudget, slots: int = 64, noise: float = 0.05, gap: float = 0.1):
        self.machine, self.budget, self.slots = machine, budget, slots
        self.now = 0.0
        self._noise, self._gap = noise, gap
        self._draw = random.Random(0)
        self._scheduler = Scheduler(slots, 1, lambda source, target, length: None)
        self._records: dict[Sequence, Seen] = {}
        self._tokens_to_come: dict[Sequence, int] = {}  # tokens of the answer that are still to come
        self._new: dict[Sequence, int] = {}  # tokens of pictures that are not encoded yet

    def run(self, arrivals: list[Arrival]) -> Outcome:
        """Answer all requests and return the figures."""
        coming = sorted(arrivals, key=lambda arrival: arrival.at)[::-1]
        every: list[Seen] = []
        while coming or self._scheduler.waiting or self._scheduler.running or self._scheduler.filling:
            if not (self._scheduler.waiting or self._scheduler.running or self._scheduler.filling):
                self.now = max(self.now, coming[-1].at)
            while coming and coming[-1].at <= self.now:
                every.append(self._enqueue(coming.pop()))
            self._step()
        return outcome(every, self.now - min(arrival.at for arrival in arrivals))

    def _enqueue(self, arrival: Arrival) -> Seen:
        prompt = cast(Any, SimpleNamespace(length=arrival.tokens))
        sequence = Sequence(Spec(prompt))
        self._scheduler.enqueue([sequence])
        self._tokens_to_come[sequence], self._new[sequence] = arrival.answer, arrival.pictures
        record = self._records[sequence] = Seen(arrival)
        return record

    def _step(self) -> None:
        scheduler, budget = self._scheduler, self.budget
        self._note_ready()
        running = len(scheduler.running)
        waiting = list(scheduler.waiting)[: scheduler.slots - running] if scheduler.filling is None else []
        tokens = sum(sequence.prompt.length for sequence in waiting)
        budget.refresh()
        waits = bool(running and waiting) and budget.holds_back(running, len(waiting), tokens, self.now)
        self._take_in(Allowance() if waits else budget.allowance(running))
        if scheduler.running:
            self._spend(budget.decode, len(scheduler.running), self.machine.decoding(len(scheduler.running)))
            for sequence in list(scheduler.running):
                self._count_token(sequence)
                if not self._tokens_to_come[sequence]:
                    scheduler.release(sequence)

    def _take_in(self, allowance: Allowance) -> StepTotals:
        scheduler = self._scheduler
        scheduler.budget = allowance.tokens()
        upcoming = scheduler.upcoming() if allowance.most else []
        new = [self._new[prompt] for prompt in upcoming]
        plan = allowance.plan([(scheduler.unread(prompt), size) for prompt, size in zip(upcoming, new, strict=True)])
        values = sum(new[: plan.prompts])
        if upcoming and not plan.prompts:  # as many of the first one's pictures as fit, at least one
            values = min(new[0], max(PICTURE, int(allowance.values() // PICTURE) * PICTURE))
            self._new[upcoming[0]] -= values
        if values:
            self._spend(self.budget.picture, values, self.machine.encoding(values))
        for prompt in upcoming[: plan.prompts]:
            self._new[prompt] = 0
        if not allowance.most or (upcoming and not plan.runs):
            return StepTotals(values=values)
        scheduler.budget = allowance.tokens(values)
        batch = scheduler.next_prefill(lambda sequence: not self._new[sequence])
        if not batch:
            return StepTotals(values=values)
        part = allowance.part(scheduler.unread(batch[0]), values)
        lengths = [part if len(batch) == 1 else prompt.prompt.length for prompt in batch]
        padded = len(batch) * max(lengths)
        self._spend(self.budget.prompt, padded, self.machine.prefill(padded))
        for prompt, length in zip(batch, lengths, strict=True):
            prompt.computed += length
            if prompt.computed >= prompt.prompt.length:
                scheduler.prefilled(prompt)
                self._count_token(prompt)
        return StepTotals(padded, len(batch), values)

    def _spend(self, price: Any, units: float, seconds: float) -> None:
        seconds *= self._draw.lognormvariate(0.0, self._noise)
        self.now += seconds
        price.learn(units, seconds)

    def _count_token(self, sequence: Sequence) -> None:
        """Count a token of a sequence; tokens after the end of its answer are not counted."""
        record = self._records[sequence]
        if math.isinf(record.first):
            record.first = self.now
        else:
            record.gaps.append(self.now - record.last)
        record.last = self.now
        self._tokens_to_come[sequence] -= 1

    def _note_ready(self) -> None:
        """Note, for requests that have a slot now, when they might have run.

        All before them run in passes that keep the bound, or that pay for themselves, each beside a decode, with their
        pictures.
        """
        scheduler, machine = self._scheduler, self.machine
        filling = [] if scheduler.filling is None else [scheduler.filling]
        free = scheduler.slots - len(scheduler.running) - len(filling)
        due = [*filling, *list(scheduler.waiting)[:free]]
        if not any(math.isinf(self._records[sequence].ready) for sequence in due):
            return
        decode = machine.decoding(len(scheduler.running))
        chunk = max((self._gap - decode - machine.fixed) / machine.token, machine.fixed / machine.token, 16)
        before = 0.0
        batch: list[Sequence] = []
        for sequence in due:
            alike = [scheduler.unread(member) for member in (*batch, sequence)]
            seconds = self._seconds([*batch, sequence], chunk, decode)
            if batch and (max(alike) * len(alike) > chunk or seconds > self._gap):
                before += self._seconds(batch, chunk, decode)
                batch = []
            batch.append(sequence)
            record = self._records[sequence]
            if math.isinf(record.ready):
                record.ready, record.due = self.now, before + self._seconds(batch, chunk, decode)

    def _seconds(self, batch: list[Sequence], chunk: float, decode: float) -> float:
        """Return the seconds that these prompts take together, divided into steps."""
        tokens = len(batch) * max(self._scheduler.unread(member) for member in batch)
        encoding = self.machine.encoding(sum(self._new[member] for member in batch))
        passes = math.ceil(tokens / chunk) if len(batch) == 1 else 1
        steps = passes + max(0, math.ceil(encoding / self._gap) - 1)
        return self.machine.token * tokens + passes * self.machine.fixed + encoding + steps * decode


def outcome(every: list[Seen], seconds: float) -> Outcome:
    """Return the figures of requests that were answered in `seconds`."""
    gaps = np.concatenate([np.array(record.gaps) for record in every])
    first = np.array([record.first - record.asked.at for record in every])
    waits = [(record.first - record.ready) / record.due for record in every]
    return Outcome(
        sum(record.asked.answer for record in every) / seconds,
        float(np.percentile(gaps, 99)),
        float(np.median(first)),
        float(np.percentile(first, 99)),
        max(waits),
    )
