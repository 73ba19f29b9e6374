"""The commands of this room: `helmsight probe` builds vectors, `helmsight eval` runs benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.commands import probe
from probes.commands.common import Defaults, own_vectors
from probes.mc2 import command as mc2
from probes.sage import command as sage

if TYPE_CHECKING:
    from probes.commands.common import DemoFaithfulness, DemoSamples


def register(
    subparsers: Any,
    *,
    demo_samples: DemoSamples | None = None,
    demo_faithfulness: DemoFaithfulness | None = None,
    default_model: str | Path | None = None,
    vector_folders: Callable[[], Sequence[Path]] | None = None,
) -> None:
    """Add the commands to a parser's subparsers; each sets `func`, which takes the arguments and returns a status.

    What is drawn where no file is given is handed in, because this room does not know the demo world (see `Defaults`).
    """
    defaults = Defaults(demo_samples, demo_faithfulness, default_model, vector_folders or own_vectors)
    probe.register(subparsers, defaults)
    parser = subparsers.add_parser("eval", help="run a benchmark")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    mc2.register(benchmarks, defaults)
    if demo_faithfulness is not None:
        sage.register(benchmarks, defaults)
