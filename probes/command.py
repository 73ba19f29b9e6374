"""The commands of this room: `helmsight probe` builds vectors, `helmsight eval` runs benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from probes.commands import probe
from probes.harness import benchmark
from probes.harness.benchmark import Benchmark
from probes.harness.options import Defaults, own_vectors
from probes.mc2.command import BENCHMARK as MC2
from probes.sage.command import BENCHMARK as SAGE

BENCHMARKS: list[Benchmark] = [MC2, SAGE]
"""What `helmsight eval` runs, each a folder of its own."""


def register(
    subparsers: Any,
    *,
    demo_samples: Callable[[int, int], Sequence[Any]] | None = None,
    demo_faithfulness: Callable[[int, int, int, float], tuple[Sequence[Any], ...]] | None = None,
    default_model: str | Path | None = None,
    vector_folders: Callable[[], Sequence[Path]] | None = None,
) -> None:
    """Add the commands to a parser's subparsers; each sets `func`, which takes the arguments and returns a status.

    What is drawn where no file is given is handed in, because this room does not know the demo world: conflicts by count
    and seed; existence questions, pairs of pictures and the names of objects by both counts, seed and noise.
    """
    draw = {"conflicts": demo_samples, "sage": demo_faithfulness}
    defaults = Defaults(
        default_model, vector_folders or own_vectors, {name: one for name, one in draw.items() if one is not None}
    )
    probe.register(subparsers, defaults)
    benchmarks = subparsers.add_parser("eval", help="run a benchmark").add_subparsers(
        title="benchmarks", required=True, metavar="BENCHMARK"
    )
    for one in BENCHMARKS:
        benchmark.register(benchmarks, one, defaults)
