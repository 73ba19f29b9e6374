"""The conditions that SAGE's benchmark compares."""

from __future__ import annotations

from probes.harness.comparison import BASELINE
from probes.harness.conditions import Conditions, others
from steering import Generate, See, Think
from steering.interventions.see import Reading

FULL = "+ Generate"
"""The condition with all stages, which other benchmarks call SAGE."""


def stages(sweep: bool = False) -> Conditions:
    """Return the paper's ablation (its Table 14), stage by stage, and further conditions.

    These are SAGE with a mask that is rebuilt, and See in the other reading of the paper's equations, both of which it
    leaves open; and every other intervention that has defaults for all its options, among them the methods that the paper
    compares with. With `sweep` its Tables 11 to 13 follow, one stage at a time.
    """
    other_reading: Reading = "transfer" if See().reading == "scale" else "scale"
    conditions: Conditions = {
        BASELINE: (),
        "+ See": (See(),),
        "+ Think": (See(), Think()),
        FULL: (See(), Think(), Generate()),
        "SAGE, refresh 1": (See(), Think(), Generate(refresh=1)),
        "SAGE, refresh 4": (See(), Think(), Generate(refresh=4)),
        f"See as {other_reading}": (See(reading=other_reading),),
        f"SAGE, See as {other_reading}": (See(reading=other_reading), Think(), Generate()),
    }
    if sweep:
        conditions |= _sweep(other_reading)
    return conditions | others()


def _sweep(other_reading: Reading) -> Conditions:
    """Return each stage alone with several settings, See in both of its readings."""
    conditions: Conditions = {
        f"See as {reading}, alpha {alpha:g}": (See(alpha=alpha, reading=reading),)
        for reading in (See().reading, other_reading)
        for alpha in (0.05, 0.1, 0.15, 0.2)
    }
    conditions |= {f"Think, gamma {gamma:g}": (Think(gamma=gamma),) for gamma in (0.6, 0.7, 0.8, 0.9)}
    return conditions | {
        f"Generate, lambda {weight:g}": (Generate(weight=weight),) for weight in (0.25, 0.5, 0.75, 1.0)
    }
