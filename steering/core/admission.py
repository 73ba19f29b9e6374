"""Admission control: which answers may join the queue, by its length, fairness between groups and the expected wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from steering.core.budget import Allowance
from steering.core.scheduler import Scheduler
from steering.errors import Busy
from steering.protocol.sequence import Sequence

KEPT = 8
"""Ratio of queue places to those kept for groups that have none waiting."""
LEAST, MOST = 1.0, 60.0
"""Least and greatest delay that a refused client is told to wait, in seconds."""
_WEIGHT = 0.2
"""Weight of a new time in the mean."""
_OUTLIER = 4.0
"""Maximum ratio of a counted time to the mean; longer times, as of a pause of the machine, count as this much."""


class Rate:
    """Measured rates of an engine.

    The mean tokens of an answer, over about the last `MEMORY`, and exponentially weighted means of the seconds of a step and
    of one that takes in prompts. Idle times do not count.
    """

    MEMORY = 64

    def __init__(self) -> None:
        self._tokens = self._step = self._prefill = 0.0
        self._ended = 0

    def step(self, seconds: float, tokens: int) -> None:
        """Count a step that took in `tokens` prompt tokens."""
        self._step = _mean(self._step, seconds)
        if tokens:
            self._prefill = _mean(self._prefill, seconds)

    def ended(self, tokens: int) -> None:
        """Count an answer that had `tokens` tokens when it freed its slot."""
        self._ended += 1
        self._tokens += (max(tokens, 1) - self._tokens) / min(self._ended, self.MEMORY)

    def until_ended(self, count: int, running: Iterable[tuple[int, int]]) -> float:
        """Estimate the seconds until `count` slots become free.

        running: (tokens so far, maximum tokens) of each answer that has a slot. Infinite while no answer has ended.

        With T tokens an answer, S seconds a step and n running answers, `count` end within count * T / n * S, if they are
        spread evenly; and if each is as long as the mean, not before the `count`-th of them has its T. The later of both
        counts, as answers that began together end together.
        """
        if count <= 0:
            return 0.0
        remaining = sorted(max(min(self._tokens, most) - so_far, 0.0) for so_far, most in running)
        if not self._tokens or not remaining:
            return math.inf
        rounds, last = divmod(count - 1, len(remaining))
        return max(count * self._tokens / len(remaining), rounds * self._tokens + remaining[last]) * self._step

    def until_read(self, tokens: int, pictures: Iterable[int], allowance: Allowance) -> float:
        """Estimate the seconds until `tokens` prompt tokens, and pictures of so many values each, were taken in.

        A step takes in some of them, and at least one picture.
        """
        steps = tokens // max(allowance.tokens(), 1)
        if sizes := list(pictures):
            fitting = min(allowance.values(), 2 * sum(sizes)) * len(sizes) // sum(sizes)
            steps += int(len(sizes) // max(1, fitting))
        return steps * self._prefill


class AdmissionControl:
    """Lets answers join the queue of a scheduler, or raises Busy.

    `most` may wait, and half as many again, of groups that have less waiting than others. With `longest`, an answer that is
    expected to wait longer than so many seconds for its slot is refused (None: no limit). alive: sequences that have joined
    and not left. incoming: sequences that are about to join. allowance: the limits of a step. All methods are called with
    the engine's lock held.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rate: Rate,
        alive: Collection[Sequence],
        incoming: Callable[[], list[Sequence]],
        allowance: Callable[[], Allowance],
        most: int,
        longest: float | None,
    ):
        if longest is not None and not longest >= 0:
            raise ValueError(f"max_wait must be 0 or more seconds, or None; got {longest!r}.")
        self._scheduler = scheduler
        self._rate = rate
        self._alive = alive
        self._incoming = incoming
        self._allowance = allowance
        self._most = most
        self._longest = longest

    def check(self, answers: int, group: str) -> None:
        """Raise Busy where so many more answers of a group do not fit, or would wait too long."""
        waiting = self.waiting
        free = self._scheduler.slots - (len(self._alive) - len(self._scheduler.waiting))
        reserve = self._most // KEPT if self._scheduler.has_waiting(group) else 0
        if waiting + answers > self._most - reserve + free and not self._is_short(group, answers, free):
            raise Busy(waiting, _bounded(self._until_ended(waiting)))
        if self._longest is not None and (wait := self.wait(answers, group)) > self._longest:
            raise Busy(waiting, _bounded(wait - self._longest), self._longest)

    def _is_short(self, group: str, answers: int, free: int) -> bool:
        """Return True where a group's answers fit in its even share of the places while another group exceeds its own.

        Without this, those that came first would hold all places, and giving slots in turns alone would not be fair. There
        are half as many places again for it, the share of one of two groups. No group may have more waiting than places are
        left, so that others find some after it: dynamic thresholds (Choudhury and Hahne 1998).
        """
        by_group = Counter(sequence.queue.group for sequence in (*self._scheduler.waiting, *self._incoming()))
        places = self._most + self._most // 2 + free - by_group.total()
        own = by_group.pop(group, 0)
        share = max(1, self._most // (len(by_group) + 1))
        above = any(count > share for count in by_group.values())
        return bool(group) and above and own + answers <= min(share, places)

    def wait(self, answers: int, group: str) -> float:
        """Estimate the seconds that `answers` answers of a group would wait, if they came now.

        They wait until those before them have slots, `answers` more slots are free, and the prompts of those before are
        prefilled.
        """
        before = [*self._scheduler.before(group), *self._incoming()]
        needed = sum(
            sequence.rows for sequence in (*self._slotted(), *before) if sequence.slot >= 0 or not sequence.is_twin
        )
        unread = [sequence for sequence in (*self._slotted(), *before) if sequence.prefill.fork_of is None]
        tokens = sum(max(sequence.prompt.length - sequence.computed, 0) for sequence in unread)
        pictures = [picture.values for sequence in unread if sequence.slot < 0 for picture in sequence.prompt.pictures]
        ended = self._until_ended(needed + answers - self._scheduler.slots)
        return max(ended, self._rate.until_read(tokens, pictures, self._allowance()))

    @property
    def waiting(self) -> int:
        """The number of answers in the queue or about to join it."""
        return len(self._scheduler.waiting) + len(self._incoming())

    def _slotted(self) -> list[Sequence]:
        return [sequence for sequence in self._alive if sequence.slot >= 0]

    def _until_ended(self, count: int) -> float:
        """Estimate the seconds until `count` slots are free, as if waiting sequences already held the free slots."""
        sequences = [*self._slotted(), *self._scheduler.waiting, *self._incoming()][: self._scheduler.slots]
        return self._rate.until_ended(
            count, [(len(sequence.tokens), sequence.spec.max_tokens) for sequence in sequences]
        )


def _bounded(seconds: float) -> float:
    return min(max(LEAST, seconds), MOST)


def _mean(so_far: float, value: float) -> float:
    """Return an exponentially weighted mean with one more value in it; 0 means no values so far."""
    return so_far + _WEIGHT * (min(value, _OUTLIER * so_far) - so_far) if so_far else value
