"""The sections of the benchmark, each run on its own.

`python -m steering.bench.sections NAME SETUP` writes a section's rows as lines of JSON, as they come.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass

from steering.bench import extras, launches, precision, speed
from steering.bench.device import facts, peak_bytes
from steering.bench.load import serving, start
from steering.bench.rows import Gauge, Unavailable
from steering.bench.trial import Trial

Figures = Callable[[Trial], Iterator[Gauge]]


@dataclass(frozen=True)
class Section:
    """A section of the benchmark.

    figures: measures it. budget: seconds after which it is ended, including the start of its process. usual: it runs by
    default.
    """

    figures: Figures
    budget: float
    usual: bool = True


SECTIONS = {
    "limits": Section(speed.limits, 20),
    "decode": Section(speed.decode, 50),
    "first token": Section(speed.first_token, 35),
    "precision": Section(precision.precision, 40),
    "launches": Section(launches.launches, 40),
    "overhead": Section(extras.overhead, 90),
    "serving": Section(serving.serving, 100),
    "start": Section(start.start, 100),
    "eager": Section(speed.eager, 60, usual=False),
}
"""The sections in the order in which they run; the budgets of the default ones are less than eight minutes together."""


def rows_of(name: str, trial: Trial) -> Iterator[Gauge]:
    """Yield a section's rows, and its peak memory; where it fails, a row with the reason after those it has made."""
    try:
        yield from SECTIONS[name].figures(trial)
    except Unavailable as reason:
        yield Gauge(name, "not measured", None, note=str(reason))
    except Exception as error:
        yield Gauge(name, "failed", None, note=in_one_line(error))
    try:
        for kind, size in peak_bytes(trial.place).items():
            yield Gauge(name, f"most memory, {kind}", size / 2**30, "GiB")
    except Exception as error:  # a device that has failed reports nothing
        yield Gauge(name, "most memory", None, note=in_one_line(error))


def in_one_line(error: Exception) -> str:
    """Return an error as one line: its kind, and the first line of its message."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:300]}"


def main() -> int:
    """Write the facts of the device, and the rows of a section."""
    name, trial = sys.argv[1], Trial(**json.loads(sys.argv[2]))
    with os.fdopen(os.dup(1), "w") as written, redirect_stdout(sys.stderr):  # other output must not mix with the rows
        print(json.dumps({"machine": facts(trial.place)}), file=written, flush=True)
        for row in rows_of(name, trial):
            print(json.dumps({"row": asdict(row)}), file=written, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
