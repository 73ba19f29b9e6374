"""The scheduler: waiting sequences get slots, running ones keep the first slots without holes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from steering.protocol.sequence import Sequence, State


class Scheduler:
    """Assigns slots: 0..len(running)-1 decode, and a sequence that is still in prefill holds the next one.

    `budget` bounds the prompt tokens of one step, padding included, so that running answers do not stall; `cached` returns
    how many first tokens of a prompt are cached and need not run. A sequence that `awaits` others of a step comes in the
    next. Groups get slots in turns, however many sequences each has waiting: start-time fair queueing (Goyal, Vin and Cheng
    1996) of equal weights, each answer of length 1. A sequence starts where the previous one of its group ends, but not
    before the start of the sequence that got a slot last; the least start is next, and among equal ones the first that came.
    """

    def __init__(
        self,
        slots: int,
        budget: int,
        move: Callable[[int, int, int], None],
        cached: Callable[[Sequence], int] = lambda sequence: 0,
        awaits: Callable[[Sequence, list[Sequence]], bool] = lambda sequence, others: False,
    ):
        self.slots = slots
        self.budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.filling: Sequence | None = None
        self._move = move
        self._cached, self._awaits = cached, awaits
        self._now = 0  # the start of the last sequence that got a slot
        self._ends: dict[str, int] = {}  # by group, the end of its last sequence that got a slot

    def next_forks(self) -> list[Sequence]:
        """Return the sequences at the head of the queue whose prompt only needs to be copied; assign their slots."""
        batch: list[Sequence] = []
        while self._can_admit(batch) and self.waiting[0].can_fork:
            self._admit(batch)
        return batch

    def upcoming(self) -> list[Sequence]:
        """Return the waiting sequences for which there are slots and whose prompts fit the budget together, at least one."""
        fitting: list[Sequence] = []
        widest, free = 0, self.slots - self._rows_with([])
        for sequence in self.waiting if self.filling is None else ():
            free -= 0 if sequence.is_twin else sequence.rows
            if free < 0 or (fitting and self._awaits(sequence, fitting)):
                break
            widest = max(widest, self.unread(sequence))
            if fitting and widest * (len(fitting) + 1) > self.budget:
                break
            fitting.append(sequence)
        return fitting

    def has_waiting(self, group: str) -> bool:
        """Return True where a named group (not "") has sequences in the queue."""
        return bool(group) and any(sequence.queue.group == group for sequence in self.waiting)

    def enqueue(self, sequences: list[Sequence]) -> None:
        """Insert the sequences of one request together, at their group's turn.

        Sequences that have waited in another's place come before all that have not.
        """
        if not self.waiting:
            self._now, self._ends = 0, {}
        start = self._next_start(sequences[0].queue.group)
        for sequence in sequences:
            sequence.queue.start = start
            first = sum(1 for other in self.waiting if other.is_twin or other.queue.waited)
            self.waiting.insert(first if sequence.queue.waited else self._place(start), sequence)

    def before(self, group: str) -> list[Sequence]:
        """Return the sequences that would get slots before another one of a group, if it came now."""
        return list(self.waiting)[: self._place(self._next_start(group))]

    def _place(self, start: int) -> int:
        """Return the position in the queue for a sequence of that start."""
        place = len(self.waiting)
        while place and self._is_queued(self.waiting[place - 1]) and self.waiting[place - 1].queue.start > start:
            place -= 1
        return place

    def _next_start(self, group: str) -> int:
        """Return the start of a group's next sequence, after those of it that wait."""
        end = max(self._now, self._ends.get(group, 0))
        for sequence in self.waiting:
            if sequence.queue.group == group and self._is_queued(sequence):
                end = max(end, sequence.queue.start) + 1
        return end

    @staticmethod
    def _is_queued(sequence: Sequence) -> bool:
        """Return True where a sequence waits for its group's turn."""
        return not (sequence.is_twin or sequence.queue.waited)

    def enqueue_twin(self, twin: Sequence) -> None:
        """Insert a twin before everything that has no leader."""
        ahead = sum(1 for sequence in self.waiting if sequence.is_twin)
        self.waiting.insert(ahead, twin)

    def next_prefill(self, divisible: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return the sequences whose prompts run in this step: the one begun earlier, or upcoming ones together.

        The first always runs; it is prefilled in chunks when it is longer than the budget. A prompt that is not `divisible`
        runs alone and whole. Slots are assigned.
        """
        if self.filling is not None:
            return [self.filling]
        batch: list[Sequence] = []
        for sequence in self.upcoming():
            if batch and (
                sequence.prefill.fork_of in batch
                or sequence.prefill.alone
                or batch[0].prefill.alone
                or not (divisible(batch[0]) and divisible(sequence))
            ):
                break
            self._admit(batch)
        if len(batch) == 1:
            self.filling = batch[0]
        return batch

    def unread(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt, and of a late twin's replay, still have to run."""
        return sequence.prompt.length + len(sequence.prefill.replay) - (sequence.computed or self._cached(sequence))

    def _can_admit(self, batch: list[Sequence]) -> bool:
        """Return True where there is a slot for the next one and for its twin; a twin's own slot was kept free for it."""
        if not self.waiting or self.filling is not None:
            return False
        return self.waiting[0].is_twin or self._rows_with(batch) + self.waiting[0].rows <= self.slots

    def _rows_with(self, batch: list[Sequence]) -> int:
        return sum(sequence.rows for sequence in (*self.running, *batch))

    def _admit(self, batch: list[Sequence]) -> None:
        sequence = self.waiting.popleft()
        sequence.slot, sequence.state = len(self.running) + len(batch), State.PREFILL
        if self._is_queued(sequence):
            self._now = max(self._now, sequence.queue.start)
            self._ends[sequence.queue.group] = max(self._ends.get(sequence.queue.group, 0), sequence.queue.start) + 1
        sequence.times.admitted = time.monotonic()
        batch.append(sequence)

    def retry_alone(self, batch: list[Sequence]) -> None:
        """Put back sequences whose common prefill failed, to run one by one, so that only the faulty one ends."""
        for sequence in reversed(batch):
            sequence.restart()
            self.waiting.appendleft(sequence)

    def prefilled(self, sequence: Sequence) -> None:
        """Let a sequence decode from the next step on, now that its prompt is in the pool."""
        if self.filling is sequence:
            self.filling = None
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Remove a sequence; the last running one, then the one in prefill, move into the hole."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence is self.filling:
            self.filling = None
        elif sequence in self.running:
            hole, last = sequence.slot, self.running[-1]
            if last is not sequence:
                self._relocate(last, hole)
                self.running[hole] = last
            self.running.pop()
            if self.filling is not None:
                self._relocate(self.filling, len(self.running))
        sequence.slot = -1

    def _relocate(self, sequence: Sequence, slot: int) -> None:
        self._move(sequence.slot, slot, sequence.length)
        sequence.slot = slot
