"""The scores of answers to conflicts (modality-preference paper, section 3): three shares.

A sample counts for a modality only if the answers in both orders of its options follow it; anything else, including an
answer that names no option, is "others".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from probes.conflicts.samples import Side
from probes.harness.bootstrap import wilson

Outcome = Literal["vision", "text", "others"]


def outcome(first: str | None, second: str | None) -> Outcome:
    """Return the category of a sample from the letters chosen in the unswapped and in the swapped order."""
    if (first, second) == ("A", "B"):
        return "vision"
    return "text" if (first, second) == ("B", "A") else "others"


@dataclass(frozen=True)
class Shares:
    """S_v, S_t, S_o as shares of all samples, and Vision Ratio = S_v / (S_v + S_t), None if neither occurs.

    `intervals`: Wilson's 95 % intervals by field, if requested; that of the ratio is over the decided samples.
    """

    s_vision: float
    s_text: float
    s_others: float
    vision_ratio: float | None
    n: int
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], intervals: bool = False) -> Shares:
        """Return the shares of these outcomes."""
        counts = (outcomes.count("vision"), outcomes.count("text"), outcomes.count("others"))
        return cls.of_counts(*counts, intervals=intervals)

    @classmethod
    def of_counts(cls, vision: int, text: int, others: int, intervals: bool = False) -> Shares:
        """Return the shares from the number of samples in each category."""
        n, decided = vision + text + others, vision + text
        if n == 0:
            return cls(0.0, 0.0, 0.0, None, 0)
        shares = {}
        if intervals:
            counts = {"s_vision": vision, "s_text": text, "s_others": others}
            shares = {name: wilson(count, n) for name, count in counts.items()}
            if decided:
                shares["vision_ratio"] = wilson(vision, decided)
        return cls(vision / n, text / n, others / n, vision / decided if decided else None, n, shares)

    def toward(self, side: Side) -> float:
        """Return S_v or S_t."""
        return self.s_vision if side == "vision" else self.s_text

    def to_json(self) -> dict[str, Any]:
        """Return the five fields of the report and, if computed, their intervals as `NAME_95`."""
        fields = {name: getattr(self, name) for name in ("s_vision", "s_text", "s_others", "vision_ratio", "n")}
        return fields | {f"{name}_95": list(interval) for name, interval in self.intervals.items()}
