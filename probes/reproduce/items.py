"""Rows of the reproduction: an item of a paper, the run that measures it, and the reading of the run's report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Paper = Literal["mp", "ivm", "sap", "spd"]

TITLES: Mapping[Paper, str] = {
    "mp": "Modality preference (MP)",
    "ivm": "Implicit visual misunderstanding (IVM)",
    "sap": "MM-SAP (SAP)",
    "spd": "SPD-Faith Bench and SAGE (SPD)",
}

APPEARS, ABSENT, NOTHING, IMPOSSIBLE = (
    "appears",
    "does not appear",
    "nothing to measure here",
    "cannot be done here",
)
"""The verdicts.

NOTHING is for rows that could not have come out otherwise: the effect was trained in (planted), the baseline leaves no room
above (ceiling) or below (floor), or the figure follows from how it is computed (identity).
"""

CEILING, FLOOR = 0.95, 0.05
"""The shares from which on there is no room above, and up to which there is none below."""


class UnreadableRun(Exception):
    """A run measured something else than its row asks for, as where most answers cannot be read."""


Json = Mapping[str, Any]


class Figure(NamedTuple):
    """A number of a report with its 95 % interval, if it has one."""

    value: Any
    interval: Sequence[float] | None = None


def figure(scores: Json, name: str = "value") -> Figure:
    """Return the number of this name, and its interval; raise KeyError if there is no such number."""
    return Figure(scores[name], scores.get(f"{name}_95"))


def change(scores: Json) -> Figure:
    """Return the change against plain answers; None if the number is undefined, as without claims."""
    return Figure(scores.get("difference"), scores.get("difference_95"))


def is_below(low: Json, high: Json) -> bool:
    """Return whether the interval of one number lies below that of the other; False without an interval."""
    first, second = low["value_95"], high["value_95"]
    return first is not None and second is not None and bool(first[1] < second[0])


@dataclass(frozen=True)
class Found:
    """The result of a run for a row.

    ours: a number, or several by name. appears: True if the paper's finding is seen. interval: 95 %, of that number, or by
    name of those of several numbers that have one. n: the number of samples. nothing: the reason why these figures could not
    have shown the finding, or not have missed it; empty if they could.
    """

    ours: Any
    appears: bool
    interval: Sequence[float] | Mapping[str, Sequence[float]] | None = None
    n: int | None = None
    nothing: str = ""

    @classmethod
    def of(cls, figures: Mapping[str, Figure], appears: bool, n: int | None, nothing: str = "") -> Found:
        """Combine several figures by name."""
        intervals = {name: figure.interval for name, figure in figures.items() if figure.interval is not None}
        return cls({name: figure.value for name, figure in figures.items()}, appears, intervals or None, n, nothing)

    def figures(self) -> dict[str, Figure]:
        """Return the figures by name; a single one is named ""."""
        if not isinstance(self.ours, Mapping):
            assert not isinstance(self.interval, Mapping)
            return {"": Figure(self.ours, self.interval)}
        intervals = self.interval if isinstance(self.interval, Mapping) else {}
        return {name: Figure(value, intervals.get(name)) for name, value in self.ours.items()}


@dataclass(frozen=True)
class Item:
    """A row of the list of the papers' items.

    id: its number there. theirs: the paper's figure, with its place. run: the name in `runs` of the run that measures it.
    read: the reading of that run's report.json; without these two it cannot be done here, for the reason in `why`. effect:
    the effect that must be seen for it to appear, in words. identity: the reason why it cannot fail on any model. embedded:
    the reason why the embedded models show nothing either way, as a training loss that asked for the effect.
    """

    id: int
    paper: Paper
    what: str
    theirs: str
    run: str | None = None
    read: Callable[[Json], Found] | None = None
    effect: str = ""
    why: str = ""
    identity: str = ""
    embedded: str = ""

    def __post_init__(self) -> None:
        if (self.run is None) is not bool(self.why) or (self.run is None) is not (self.read is None):
            raise ValueError(f"Item {self.id} needs a run and how it is read, or why it cannot be done.")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a row.

    verdict: one of the four. model: the one that was measured. command: the command that measured it, as a user would write
    it. why: the reason for the last two verdicts.
    """

    item: Item
    verdict: str
    found: Found | None = None
    command: str = ""
    why: str = ""
    model: str = ""

    def to_json(self) -> dict[str, Any]:
        reading = self.found
        return {
            "id": self.item.id,
            "paper": self.item.paper,
            "item": self.item.what,
            "theirs": self.item.theirs,
            "effect": self.item.effect,
            "ours": None if reading is None else reading.ours,
            "interval": None if reading is None else _list_of(reading.interval),
            "n": None if reading is None else reading.n,
            "model": self.model,
            "verdict": self.verdict,
            "why": self.why,
            "command": self.command,
        }


def _list_of(interval: Sequence[float] | Mapping[str, Sequence[float]] | None) -> Any:
    if isinstance(interval, Mapping):
        return {name: list(bounds) for name, bounds in interval.items()}
    return None if interval is None else list(interval)
