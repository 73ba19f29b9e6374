"""Which interventions and recorders have a say in a forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Slots


class Concerned(NamedTuple):
    """What has a say in a forward pass. acting: in the order in which they act, because recorders see what interventions
    change. keeping: in the order in which they keep, because interventions rest on what recorders captured."""

    acting: list[Slots]
    keeping: list[Slots]


class Concerns:
    """Finds them among all that there are, by name; a step is short, and most concern nearly nothing."""

    def __init__(self, recorders: Mapping[str, Slots], interventions: Mapping[str, Slots]):
        self._recorders = recorders
        self._interventions = interventions
        self._known: dict[tuple[frozenset[str], frozenset[Signal]], Concerned] = {}

    def of(self, sequences: Iterable[Sequence]) -> Concerned:
        """What has a say in a forward pass of these sequences."""
        asked: frozenset[str] = frozenset().union(*[sequence.spec.asked for sequence in sequences])
        signals: frozenset[Signal] = frozenset().union(*[sequence.spec.signals for sequence in sequences])
        if (asked, signals) not in self._known:

            def those(parts: Mapping[str, Slots]) -> list[Slots]:
                return [one for one in parts.values() if one.concerns(asked, signals)]

            recorders, interventions = those(self._recorders), those(self._interventions)
            self._known[asked, signals] = Concerned([*interventions, *recorders], [*recorders, *interventions])
        return self._known[asked, signals]
