"""SAGE decoding (SPD-Faith Bench paper, section 5.1): stages that can be asked for alone or together."""

from __future__ import annotations

from typing import NamedTuple

from steering.interventions.generate import Generate
from steering.interventions.see import See
from steering.interventions.think import Think


class Sage(NamedTuple):
    """The stages of one request, in the place of its interventions; None is off: `Sage(See(), Think(), Generate())`
    is all of SAGE, `Sage()` nothing (SPD-Faith Bench paper, section 5.1)."""

    see: See | None = None
    think: Think | None = None
    generate: Generate | None = None
