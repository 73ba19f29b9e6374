"""How much of the prompts that come in a step takes, so that running answers are not held up."""

from __future__ import annotations

from typing import NamedTuple

LEAST = 16
"""Prompt tokens of a step, however short the others are: less costs a forward pass and brings nothing forward."""
UNKNOWN = 32
"""Prompt tokens of a step beside running answers while nothing was measured yet: it soon takes more, where these are few."""
TELLING = 128
"""Prompt tokens of a step without running answers that tell what one takes."""
GAIN = 0.5
"""Of the way to what a step says would fit, how much the next one goes; and at most half or twice as many tokens."""
CROWDED = 6.0
"""Times as much is taken in where many wait: of a step three times as long as one without prompts these have a third, the
rest is the pass and the others' tokens; of one thirteen times as long they have five sixths."""
_SOON = 4
"""So many who run for each who waits, beyond the first, are not too many for that."""
TOGETHER = 1.5
"""Times as long as a step with a part of a prompt one may be with whole ones: each of them runs no step more."""
_DRIFT, _FIRST_DRIFT = 0.02, 0.5
"""Of a median, how much a value moves it, and how much the first one does, of which later ones do their share."""
_WEIGHT = 0.2
"""Of a new time in the mean; times that are many times as long as the mean, as of a pause of the machine, count less."""
_OUTLIER = 4.0


class Room(NamedTuple):
    """What a step may take in: prompt tokens, and new pictures, None for all that there are; together: tokens of prompts
    that come in whole, None for as many. crowd: how many times as much it is for those who wait."""

    tokens: int
    pictures: int | None = None
    together: int | None = None
    crowd: float = 1.0


class Fit:
    """How many prompt tokens fit into a step that is `stall` times as long as one that only decodes.

    What n tokens take beyond a decode is not proportional to n: a pass of few takes longer than its share, and one at the
    end of a long prompt longer than at its beginning. So n follows what steps took: where n took x seconds beyond the
    median decode of d, n * (stall - 1) * d / x would have fitted, about, and the next step goes a part of the way there: up
    also after a short prompt, of which most is the pass, down only after a step that was too long.
    """

    def __init__(self, stall: float):
        self._stall = stall
        self._fit = 0.0

    def learn(self, seconds: float, tokens: float, decode: float, first: float) -> None:
        """Learn from tokens that took so many seconds beside a decode; `first` is what was taken for the measure of a step
        before there was one. Of a step for a crowd it is a share of both."""
        now, room = self._fit or first, (self._stall - 1) * decode
        beyond = max(seconds, room / 4)
        fit = min(max(tokens * room / beyond, now / 2), now * 2)
        if (fit > now) == (beyond < room):
            self._fit = max(LEAST, now * (fit / now) ** GAIN)

    def tokens(self, first: float, most: int) -> int:
        """So many, at most."""
        self._fit = min(self._fit, float(most))
        return min(most, round(max(LEAST, self._fit or first)))


class Pace:
    """Bounds what a step takes in that running answers share, so that it takes `stall` times as long as one without, and
    `TOGETHER` times that where prompts come in whole; and the pictures, to as many as are encoded in what that
    leaves beside two passes, but one in any case. Where many wait, it is more of all, by little and little they would hold
    up more answers than they spare: up to `CROWDED` times as much, which a quarter as many as run and one more bring about,
    and as many times as more wait than run. `most` tokens are taken where nobody runs.
    Raises ValueError unless `stall` is above 2.
    """

    def __init__(self, stall: float, most: int):
        if not stall > 2:
            raise ValueError(f"max_stall must be above 2, the passes of a decode and of a prefill; got {stall!r}.")
        self._stall = stall
        self._most = most
        self._decode, self._decodes = 0.0, 0  # seconds of a decode, the median, and how many there were
        self._token = 0.0  # seconds of a prompt token where nobody runs
        self._picture = 0.0  # seconds that encoding one takes
        self._alone, self._together = Fit(stall), Fit(stall * TOGETHER)

    def step(
        self, seconds: float, decode: float, tokens: int, running: bool, prompts: int = 1, crowd: float = 1.0
    ) -> None:
        """Learn from a step that took so many seconds to take in so many tokens of so many prompts, beside running answers
        or not, and then so many to decode, 0 where it did not; crowd: as of the room that it had."""
        if decode:
            self._decodes += 1
            self._decode = _median(self._decode, decode, max(_DRIFT, _FIRST_DRIFT / self._decodes))
        if not tokens:
            return
        if not running and tokens >= TELLING:
            self._token = mean(self._token, seconds / tokens)
        elif running and self._decode:
            for fit in (self._together, *([self._alone] if prompts == 1 else [])):
                fit.learn(seconds / crowd, tokens / crowd, self._decode, self._first)

    def encoded(self, seconds: float, pictures: int) -> None:
        """Learn from so many pictures that were encoded."""
        self._picture = mean(self._picture, seconds / pictures)

    def room(self, running: int, waiting: int = 0) -> Room:
        """What the next step may take in, where so many run, and so many wait for whom there are slots."""
        if not running:
            return Room(self._most)
        crowd = max(1.0, waiting / running, CROWDED * min(1.0, _SOON * (waiting - 1) / running))
        pictures = int((self._stall * TOGETHER - 2) * self._decode / self._picture * crowd) if self._picture else 1
        fitting = (fit.tokens(self._first, self._most) for fit in (self._alone, self._together))
        tokens, together = (min(self._most, round(one * crowd)) for one in fitting)
        return Room(tokens, max(1, pictures), max(tokens, together), crowd)

    @property
    def _first(self) -> float:
        """Tokens of a step before one was measured: by a prompt that nobody ran beside."""
        return (self._stall - 2) * self._decode / self._token if self._token and self._decode else UNKNOWN


def mean(so_far: float, value: float) -> float:
    """An exponentially weighted mean with one more value in it; 0 is that of none."""
    return so_far + _WEIGHT * (min(value, _OUTLIER * so_far) - so_far) if so_far else value


def _median(so_far: float, value: float, drift: float) -> float:
    """A median that follows by so much, with one more value in it; 0 is that of none."""
    return so_far * (1 + drift) ** (1 if value > so_far else -1) if so_far else value
