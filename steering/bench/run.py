"""The runner of sections, each in its own process, so that one cannot break memory or the device for the next."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from steering.bench.rows import Gauge
from steering.bench.sections import SECTIONS
from steering.bench.trial import Trial


@dataclass
class Sheet:
    """The rows measured so far, and the facts of the machine."""

    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[Gauge] = field(default_factory=list)


def usual() -> list[str]:
    """Return the names of the sections that run by default."""
    return [name for name, section in SECTIONS.items() if section.usual]


def run(names: Iterable[str], trial: Trial, begun: Callable[[str], object] = lambda name: None) -> Sheet:
    """Run some sections; call `begun` with the name of each."""
    sheet, at = Sheet(), time.monotonic()
    for name in names:
        begun(name)
        section(sheet, name, trial, SECTIONS[name].budget)
    about = {"model": f"random {trial.shape}, {trial.dtype}, on {trial.device}{', quick' if trial.quick else ''}"}
    sheet.machine |= about | {"seconds": round(time.monotonic() - at)}
    return sheet


def section(sheet: Sheet, name: str, trial: Trial, budget: float) -> None:
    """Add the rows of one section, run within its budget of seconds, and a row with the reason where it was ended."""
    command = [sys.executable, "-m", "steering.bench.sections", name, json.dumps(asdict(trial))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ended = ""
        try:
            out, errors = process.communicate(timeout=budget)
        except subprocess.TimeoutExpired:
            process.kill()
            out, errors = process.communicate()
            ended = f"Its {budget:g} seconds were over."
        except BaseException:
            process.kill()
            raise
    for line in out.splitlines():
        event = json.loads(line)
        if "row" in event:
            sheet.rows.append(Gauge(**event["row"]))
        else:
            sheet.machine |= event["machine"]
    if process.returncode and not ended:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
        ended = f"Its process ended with status {process.returncode}: {last[:300]}"
    if ended:
        sheet.rows.append(Gauge(name, "ended", None, note=ended))
