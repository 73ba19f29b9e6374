"""Conditions on the numbers that readouts keep of an answer, such as `alarm` or `focus_share < .5`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from steering.protocol.readout import REGISTRY, Scalar

SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
COMPARISON = r"\s*(<=|>=|==|!=|<|>)\s*(-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*"
"""The pattern of a sign and a number."""


def conditioned() -> dict[str, tuple[str, type]]:
    """Return the numbers that conditions can be about: for each name its readout and its type."""
    return {name: (readout.name, kind) for readout in REGISTRY.values() for name, kind in readout.scalars.items()}


@dataclass(frozen=True)
class NumberCondition:
    """A condition on the number `name`, which `readout` keeps: equal to the truth `wanted`, or a comparison with a bound."""

    signs: ClassVar[tuple[str, ...]] = tuple(SIGNS)
    """The signs of comparisons."""
    pattern: ClassVar[str] = COMPARISON
    """The pattern of a comparison."""

    name: str
    readout: str
    wanted: bool | tuple[str, float]

    @classmethod
    def of(cls, name: str, value: bool | str) -> NumberCondition:
        """Return the condition on a number: a truth, or a comparison such as "< .5".

        Raises KeyError for a number that no readout keeps, ValueError for a condition that it cannot have.
        """
        readout, kind = conditioned()[name]
        if kind is bool:
            if not isinstance(value, bool):
                raise ValueError("must be true or false")
            return cls(name, readout, value)
        match = re.fullmatch(COMPARISON, value) if isinstance(value, str) else None
        if match is None or not math.isfinite(bound := float(match[2])):
            raise ValueError("must be a sign and a number, such as '< .5'")
        return cls(name, readout, (match[1], bound))

    @classmethod
    def written(cls, text: str) -> NumberCondition:
        """Return a condition as a command line has it: `alarm`, `alarm=false`, or `focus_share<.5`; raises as `of`."""
        match = re.fullmatch(r"\s*(\w+)(.*)", text, re.DOTALL)
        name, comparison = (text, "") if match is None else match.groups()
        return cls.of(name, {"": True, "=true": True, "=false": False}.get(comparison.strip(), comparison))

    @property
    def text(self) -> str:
        """The condition as a command line has it."""
        if isinstance(self.wanted, bool):
            return self.name if self.wanted else f"{self.name}=false"
        return f"{self.name}{self.wanted[0]}{self.wanted[1]:g}"

    def holds(self, value: Scalar) -> bool:
        """Return True where a number meets the condition; None, which an answer does not have, meets none."""
        if value is None:
            return False
        if isinstance(self.wanted, bool):
            return value is self.wanted
        sign, bound = self.wanted
        return SIGNS[sign](float(value), bound)
