"""The commands of this room: `helmsight prepare`, `probe`, `eval` and `reproduce`."""

from __future__ import annotations

import typer

from probes.alarm.command import BENCHMARK as ALARM
from probes.alarm.guard.command import BENCHMARK as GUARD
from probes.ambigcaps.command import BENCHMARK as AMBIGCAPS
from probes.chair.command import BENCHMARK as CHAIR
from probes.commands.prepare import prepare
from probes.commands.probe import probe
from probes.faithfulness.command import BENCHMARK as FAITHFULNESS
from probes.harness import benchmark
from probes.harness.benchmark import Benchmark
from probes.harness.loading.flags import loading_flags, model_flags
from probes.harness.options import Command, with_flags
from probes.mc2.command import BENCHMARK as MC2
from probes.mme.command import BENCHMARK as MME
from probes.mmsap.command import BENCHMARK as MM_SAP
from probes.phd.command import BENCHMARK as PHD
from probes.pope.command import BENCHMARK as POPE
from probes.readings.command import BENCHMARK as READINGS
from probes.reproduce.command import reproduce
from probes.sage.command import BENCHMARK as SAGE
from probes.spd.command import BENCHMARK as SPD
from probes.stme.command import BENCHMARK as STME
from probes.tallyqa.command import BENCHMARK as TALLYQA
from probes.vsr.command import BENCHMARK as VSR

LISTS: list[Benchmark] = [POPE, MME, CHAIR, PHD, VSR, TALLYQA, AMBIGCAPS]
"""The benchmarks that are lists of questions on single pictures."""
BENCHMARKS: list[Benchmark] = [MC2, SAGE, SPD, STME, MM_SAP, FAITHFULNESS, ALARM, GUARD, READINGS, *LISTS]
"""The benchmarks of `helmsight eval`, each a folder of its own."""


def register(app: typer.Typer) -> None:
    """Add the commands.

    Their defaults, and the functions that draw samples where no file is given, are `options.Defaults`, the object of their
    context: this room does not know the demo world.
    """
    app.command("probe", cls=Command)(with_flags(probe, model_flags()))
    app.command("prepare", cls=Command)(with_flags(prepare, model_flags(named=False)))
    benchmarks = typer.Typer(no_args_is_help=True)
    for entry in BENCHMARKS:
        benchmark.register(benchmarks, entry)
    app.add_typer(benchmarks, name="eval")
    app.command("reproduce", cls=Command)(with_flags(reproduce, loading_flags()))
