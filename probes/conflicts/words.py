"""A report's words for the conflicts asked, and for the instructions in their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from probes.conflicts.options import Data
from probes.conflicts.samples import ConflictSample, Wording

INSTRUCTIONS: dict[Wording, str] = {
    "paper": "the authors' pair that they mark as used in the paper",
    "v2": "the authors' version 2",
    "v1": "the authors' version 1",
    "case": "the short one of the case in the paper's figure 12",
}


def origin(data: Data, samples: Sequence[ConflictSample], seed: int) -> str:
    """Return the number of samples, their source, tasks and seed in words."""
    of = f" of the tasks {', '.join(sorted(data.tasks))}" if data.tasks else ""
    if data.mc2:
        return f"{len(samples)} conflicts{of} from {Path(data.mc2).name}, in the order of seed {data.seed}"
    return f"{len(samples)} conflicts{of} over held-out scenes of the demo world, drawn with seed {seed}"
