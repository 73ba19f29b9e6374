"""What a row of the reproduction is: an item of a paper, the run that measures it, and how the run's report is read."""

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

APPEARS, ABSENT, IMPOSSIBLE = "appears", "does not appear", "cannot be done here"
"""The verdicts."""

Json = Mapping[str, Any]


class Figure(NamedTuple):
    """A number of a report with its interval of 95 %, where it has one."""

    value: Any
    interval: Sequence[float] | None = None


def figure(scores: Json, name: str = "value") -> Figure:
    """The number of this name, and the interval that stands beside it. Raises KeyError where there is no such number."""
    return Figure(scores[name], scores.get(f"{name}_95"))


def change(scores: Json) -> Figure:
    """What is changed against plain answers; nothing where the number does not exist, as where nothing is claimed."""
    return Figure(scores.get("difference"), scores.get("difference_95"))


@dataclass(frozen=True)
class Found:
    """What a run says of a row. ours: a number, or several by name. appears: whether the paper's finding is seen.
    interval: 95 %, of that number, or of those of the several that have one by their names. n: the samples behind it."""

    ours: Any
    appears: bool
    interval: Sequence[float] | Mapping[str, Sequence[float]] | None = None
    n: int | None = None

    @classmethod
    def of(cls, figures: Mapping[str, Figure], appears: bool, n: int | None) -> Found:
        """Of several figures by name."""
        intervals = {name: one.interval for name, one in figures.items() if one.interval is not None}
        return cls({name: one.value for name, one in figures.items()}, appears, intervals or None, n)

    def figures(self) -> dict[str, Figure]:
        """By name; a single one has none, and is called ""."""
        if not isinstance(self.ours, Mapping):
            assert not isinstance(self.interval, Mapping)
            return {"": Figure(self.ours, self.interval)}
        known = self.interval if isinstance(self.interval, Mapping) else {}
        return {name: Figure(value, known.get(name)) for name, value in self.ours.items()}


@dataclass(frozen=True)
class Item:
    """A row of the list of what the papers hold. id: its number there. theirs: the paper's figure, with its place. run: by
    its name in `runs`, what measures it, and read: what that run's report.json says of it; without them it cannot be done
    here, and `why` says why. effect: what must be seen for it to appear, in words."""

    id: int
    paper: Paper
    what: str
    theirs: str
    run: str | None = None
    read: Callable[[Json], Found] | None = None
    effect: str = ""
    why: str = ""

    def __post_init__(self) -> None:
        if (self.run is None) is not bool(self.why) or (self.run is None) is not (self.read is None):
            raise ValueError(f"Item {self.id} needs a run and how it is read, or why it cannot be done.")


@dataclass(frozen=True)
class Outcome:
    """What became of a row. verdict: one of the three. command: what measured it, as a user would say it."""

    item: Item
    verdict: str
    found: Found | None = None
    command: str = ""
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        found = self.found
        return {
            "id": self.item.id,
            "paper": self.item.paper,
            "item": self.item.what,
            "theirs": self.item.theirs,
            "effect": self.item.effect,
            "ours": None if found is None else found.ours,
            "interval": None if found is None else _listed(found.interval),
            "n": None if found is None else found.n,
            "verdict": self.verdict,
            "why": self.why,
            "command": self.command,
        }


def _listed(interval: Sequence[float] | Mapping[str, Sequence[float]] | None) -> Any:
    if isinstance(interval, Mapping):
        return {name: list(bounds) for name, bounds in interval.items()}
    return None if interval is None else list(interval)
