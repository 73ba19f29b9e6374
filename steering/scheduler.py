"""Who runs next: waiting sequences get slots, running ones keep the first slots without holes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from steering.sequence import Sequence


class Scheduler:
    """Slots 0..len(running)-1 decode; a sequence that is still in prefill holds the slot behind them.

    `budget` bounds the prompt tokens (padding included) of one step, so that running answers do not stall.
    """

    def __init__(self, slots: int, budget: int, move: Callable[[int, int, int], None]):
        self.slots = slots
        self.budget = budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.filling: Sequence | None = None
        self._move = move

    def next_forks(self) -> list[Sequence]:
        """Waiting sequences at the head of the queue whose prompt only needs to be copied; slots are assigned."""
        batch: list[Sequence] = []
        while self._can_admit(batch) and self.waiting[0].can_fork:
            self._admit(batch)
        return batch

    def upcoming(self) -> list[Sequence]:
        """The waiting sequences for which there are slots and whose prompts fit the budget together, at least one."""
        fitting: list[Sequence] = []
        widest = 0
        for sequence in self.waiting:
            widest = max(widest, sequence.prompt.length)
            if not self._can_admit(fitting) or (fitting and widest * (len(fitting) + 1) > self.budget):
                break
            fitting.append(sequence)
        return fitting

    def next_prefill(self, divisible: Callable[[Sequence], bool]) -> list[Sequence]:
        """The sequences whose prompts run in this step: the one begun earlier, or upcoming ones together.

        The first always runs; it is prefilled in chunks when it is longer than the budget. A prompt that is not
        `divisible` runs alone and whole. Slots are assigned.
        """
        if self.filling is not None:
            return [self.filling]
        batch: list[Sequence] = []
        for sequence in self.upcoming():
            if batch and (
                sequence.fork_of in batch
                or sequence.alone
                or batch[0].alone
                or not (divisible(batch[0]) and divisible(sequence))
            ):
                break
            self._admit(batch)
        if len(batch) == 1:
            self.filling = batch[0]
        return batch

    def _can_admit(self, batch: list[Sequence]) -> bool:
        return bool(self.waiting) and self.filling is None and len(self.running) + len(batch) < self.slots

    def _admit(self, batch: list[Sequence]) -> None:
        sequence = self.waiting.popleft()
        sequence.slot = len(self.running) + len(batch)
        batch.append(sequence)

    def retry_alone(self, batch: list[Sequence]) -> None:
        """Put sequences whose common prefill failed back, to run one by one, so that only the guilty one ends."""
        for sequence in reversed(batch):
            sequence.slot, sequence.computed, sequence.alone = -1, 0, True
            sequence.fork_of = sequence.question_sums = sequence.last_sums = None
            sequence.norms = {}
            self.waiting.appendleft(sequence)

    def prefilled(self, sequence: Sequence) -> None:
        """The prompt is in the pool: from the next step on the sequence decodes."""
        if self.filling is sequence:
            self.filling = None
        self.running.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take a sequence out; the last running one, then the one in prefill, move into the hole."""
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
