"""The step budget: the limit on prompt tokens in a step, so that running answers do not stall.

A pass costs `fixed + each * tokens` (`price.Price`). Where the fixed part is large, as on a GPU, a prompt that is cut to
pieces pays it for each piece. So a step takes in as much as keeps the gap between two tokens of a running answer within a
bound, in one pass, and at least as many tokens as cost what their pass costs anyway.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from steering.core.price import Price

LEAST = 16
"""Least number of prompt tokens in a step, however short the step should be: fewer achieve nothing."""
FIRST = 64
"""Prompt tokens in a step beside running answers before any pass was measured.

While passes of only one size are known, short ones are followed by longer ones, and long ones by shorter ones, so that two
sizes become known.
"""
GROWTH = 4
"""Maximum ratio of a pass's size to that of the largest one that was measured."""
MERGED = 4
"""Maximum size of a merged pass, in multiples of `most` tokens; merging saves passes."""
SPARED = 8
"""Maximum size of a pass that holds nobody up, in multiples of the tokens that cost as much as the pass itself."""
MANY = 8
"""Running answers per waiting prompt from which the prompt waits for others, which saves the answers a pass."""
SHORT = 0.75
"""Maximum length of a decode, as a share of a pass's cost, for prompts to wait: they wait for one decode at least."""
GATHERED = 0.5
"""Average number of prompts that join a waiting one, below which none waits."""
_WEIGHT = 0.3
"""Weight of the last wait in that average."""
RETRY = 32
"""Passes without a wait after which waiting is tried again."""


class StepTotals(NamedTuple):
    """The totals of a step so far.

    tokens: including padding. prompts: their number. values: of new pictures. copied: some prompts were copied. waited: the
    host has waited for all of it.
    """

    tokens: int = 0
    prompts: int = 0
    values: int = 0
    copied: bool = False
    waited: bool = True

    def plus(self, more: StepTotals) -> StepTotals:
        """Return the sum of both."""
        sums = self.tokens + more.tokens, self.prompts + more.prompts, self.values + more.values
        return StepTotals(*sums, self.copied or more.copied, self.waited and more.waited)


class PassPlan(NamedTuple):
    """The plan of a step: how many waiting prompts are embedded, and whether they run in this step.

    0 prompts where the pictures of the first one alone do not fit into a step.
    """

    prompts: int
    runs: bool


class Allowance(NamedTuple):
    """The limits of one step.

    seconds: of prompts and their pictures, infinite where nobody is held up. most: maximum tokens of a pass, 0 for no pass.
    least: tokens of a pass however little time there is. fixed, each: the price of a pass and of a token. picture_fixed,
    picture_each: the price of encoding pictures, and of each of their values. row: the price of decoding one more answer.
    decode: the price of decoding the running ones. Every rank of a tensor-parallel model decides by these numbers alone.
    """

    seconds: float = math.inf
    most: float = 0
    least: float = LEAST
    fixed: float = 0.0
    each: float = 0.0
    picture_fixed: float = 0.0
    picture_each: float = 0.0
    row: float = 0.0
    decode: float = 0.0

    def encoding(self, values: float) -> float:
        """Estimate the seconds of encoding pictures of `values` values."""
        return self.picture_fixed + self.picture_each * values if values else 0.0

    def tokens(self, values: float = 0, rows: int = 1) -> int:
        """Return how many tokens fit into a pass of `rows` prompts, beside encoding pictures of `values` values."""
        least = LEAST if self._reachable else self.least
        return int(min(self.most, max(least, self._fitting(values, rows))))

    def part(self, tokens: int, values: float = 0) -> int:
        """Return how many of the tokens of a single prompt run in a pass.

        The prompt is cut into equal parts, as few as fit, because a short rest would cost a pass that does little. Where no
        pass that pays for itself fits, it is cut only into parts that do pay.
        """
        parts = -(-tokens // max(1, self.tokens(values)))
        if not self._reachable and self.least < self.most:
            parts = min(parts, int(tokens // self.least))
        return -(-tokens // max(1, parts))

    @property
    def _reachable(self) -> bool:
        """True where a pass that pays for itself fits."""
        return self._fitting() >= self.least

    def _fitting(self, values: float = 0, rows: int = 1) -> float:
        if math.isinf(self.seconds) or not self.each:
            return self.most
        return (self.seconds - self.encoding(values) - self.row * rows - self.fixed) / self.each

    def values(self) -> float:
        """Return the maximum values of pictures that are encoded in a step of their own."""
        if math.isinf(self.seconds):
            return math.inf
        if not self.picture_each or math.isinf(self.picture_each):
            return 0.0
        return max(self.seconds - self.picture_fixed, self.picture_fixed) / self.picture_each

    def plan(self, waiting: Sequence[tuple[int, int]]) -> PassPlan:
        """Decide how many of the first prompts are embedded, and whether they run in this step.

        A pass can take all of these prompts. Where their pictures leave room for few, all are encoded first, if that takes
        less time for each. waiting: (tokens, values of new pictures) of each.
        """
        count = next((count for count in range(len(waiting)) if not self._joint(waiting[: count + 1])), len(waiting))
        ahead = count
        while ahead < len(waiting) and self._encoding(waiting[: ahead + 1]) <= self.seconds:
            ahead += 1
        if count and not any(values for _, values in waiting[count:ahead]):
            return PassPlan(count, True)
        if (
            not count
            or (2 * self.decode + self._reading(waiting[:ahead])) / ahead
            < (self.decode + self._reading(waiting[:count])) / count
        ):
            return PassPlan(ahead, False)
        return PassPlan(count, True)

    def _joint(self, waiting: Sequence[tuple[int, int]]) -> bool:
        """Return True where these prompts, or the part of a single one that pays, fit into a pass with their pictures."""
        count, values, widest = len(waiting), sum(values for _, values in waiting), max(tokens for tokens, _ in waiting)
        if count > 1 and widest * count > self.tokens(values, count):
            return False
        paid = self.fixed + self.each * min(self.least, widest)
        return not values or self.encoding(values) + self.row * count + paid <= self.seconds

    def _encoding(self, waiting: Sequence[tuple[int, int]]) -> float:
        return self.encoding(sum(values for _, values in waiting))

    def _reading(self, waiting: Sequence[tuple[int, int]]) -> float:
        """Estimate the seconds of encoding these pictures and of one pass of these prompts."""
        return self._encoding(waiting) + self.fixed + self.each * len(waiting) * max(tokens for tokens, _ in waiting)

    def after(self, totals: StepTotals) -> Allowance | None:
        """Return the limits that are left after `totals`; None where another pass does not pay."""
        spent = self.encoding(totals.values) + self.row * totals.prompts
        spent += self.fixed + self.each * totals.tokens if totals.tokens else 0.0
        remaining = self._replace(seconds=self.seconds - spent, most=self.most - totals.tokens)
        pays = self.fixed + self.each * self.least
        return remaining if remaining.most >= LEAST and remaining.seconds >= pays else None


class StepBudget:
    """Learns the cost of steps and limits the next one.

    Beside running answers a step takes at most `max_gap` seconds, and at most `max_stall` times as long as one that only
    decodes; the smaller bound holds, and None is no bound. But prompts may take as long as the decode, and as a pass that
    pays for itself, so that none waits for more than twice its time. A pass takes at most `most` tokens, or up to `MERGED`
    times as many where a pass is expensive. Few prompts beside many answers wait for others to share their pass, for no
    longer than a pass costs, as long as others do come meanwhile. Without any bound nothing depends on what was measured.
    Raises ValueError for a bound that no step can keep.
    """

    def __init__(self, most: int, max_gap: float | None = None, max_stall: float | None = None):
        if max_gap is not None and not max_gap > 0:
            raise ValueError(f"max_gap must be above 0 seconds; got {max_gap!r}.")
        if max_stall is not None and not max_stall > 2:
            raise ValueError(f"max_stall must be above 2, the passes of a decode and of a prefill; got {max_stall!r}.")
        self.prompt, self.picture, self.decode = Price(), Price(), Price(guess=1.0)
        self._most = most
        self._max_gap, self._max_stall = max_gap, max_stall
        self.gathered = 1.0
        """Average number of prompts that join a waiting one."""
        self._held: tuple[float, int] | None = None  # the start of the current wait, and how many prompts waited then
        self._unheld = 0  # passes without a wait, since waiting was found not to pay

    def refresh(self) -> None:
        """Take the last passes into account; the stepping thread calls it where prompts wait."""
        for price in (self.prompt, self.picture, self.decode):
            price.refresh()

    def bound(self, rows: int) -> float:
        """Return the seconds that a step beside `rows` running answers may take."""
        stall = math.inf if self._max_stall is None else self._max_stall * self.decode.of(rows)
        return min(math.inf if self._max_gap is None else self._max_gap, stall or math.inf)

    def allowance(self, rows: int) -> Allowance:
        """Return the limits of the next step beside `rows` running answers."""
        price, bound = self.prompt, self.bound(rows)
        if self._max_gap is None and self._max_stall is None:  # offline, where chunks must not depend on times
            return Allowance(most=self._most)
        limit = min(MERGED * self._most, max(self._most, int(SPARED * price.worth)))
        if not rows:
            return Allowance(most=limit)
        decode = self.decode.spread * self.decode.of(rows)
        seconds = max(bound - decode, decode)  # else prompts would starve where a decode takes most of the bound
        least = max(LEAST, price.worth)
        if not price.count:
            most = least = FIRST
        elif price.blind:  # probe another size than the usual one
            most = least = self._probe(seconds)
        else:
            growth = max(GROWTH, seconds / price.of(price.largest))
            most = int(growth * price.largest)
        most = min(most, limit)
        costs = price.spread * price.fixed, price.spread * price.each, *self._encoding()
        return Allowance(seconds, most, min(least, most), *costs, self.decode.each, decode)

    def _probe(self, seconds: float) -> int:
        """Return the size of a pass that probes the price.

        It is larger than short passes, whatever that takes, and at most half as large as long ones, so that it fits even if
        a pass has no fixed cost.
        """
        price = self.prompt
        if price.usual < 2 * FIRST:
            return round(GROWTH * price.usual)
        return max(FIRST, round(price.usual * min(0.5, seconds / price.of(price.usual))))

    def _encoding(self) -> tuple[float, float]:
        """Return the price of encoding pictures.

        While nothing is known, only one is encoded; while only pictures of one size are known, two cost twice as much.
        """
        picture = self.picture
        if not picture.count:
            return 0.0, math.inf
        if picture.blind:
            return 0.0, picture.spread * picture.of(picture.usual) / picture.usual
        return picture.spread * picture.fixed, picture.spread * picture.each

    def holds_back(self, rows: int, prompts: int, tokens: int, now: float) -> bool:
        """Return True where waiting prompts, of `tokens` tokens together, should wait for others to share their pass."""
        if not prompts:
            self._held = None
            return False
        pays = self.prompt.measured and MANY * prompts <= rows and tokens < self.prompt.worth
        pays = pays and self.decode.of(rows) < SHORT * self.prompt.fixed
        if self._held is None:
            if not pays or not self._gathers():
                return False
            self._held = now, prompts
        since, first = self._held
        if pays and now - since < self.prompt.fixed:
            return True
        self.gathered += _WEIGHT * (prompts - first - self.gathered)
        self._held = None
        return False

    def _gathers(self) -> bool:
        """Return True where recent waits were joined by other prompts; retry once in a while."""
        if self.gathered < GATHERED:
            self._unheld += 1
            if self._unheld < RETRY:
                return False
        self._unheld = 0
        return True

    def stats(self, rows: int) -> dict[str, float]:
        """Return the prices, and what follows for a step beside `rows` running answers (at least one)."""
        rows = max(1, rows)
        fixed, decode = self.prompt.fixed, self.decode.of(rows)
        return {
            "pass_seconds": fixed,
            "prompt_token_seconds": self.prompt.each,
            "picture_seconds": self.picture.of(self.picture.usual),
            "decode_seconds": decode,
            "prompt_chunk_tokens": self.allowance(rows).tokens(),
            "gap_unreachable": float(max(2 * fixed, decode) + decode > self.bound(rows)),
        }
