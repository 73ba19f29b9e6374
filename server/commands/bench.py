"""`helmsight bench`: a table of how fast a device runs a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from probes.harness.options import Command


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", cls=Command)(bench)


def bench(
    gpu: Annotated[bool, Option("--gpu", help="use the first GPU in bfloat16 instead of the CPU in float32")] = False,
    shape: Annotated[
        Literal["7b", "9b", "small", "tiny"] | None,
        Option(
            help="size of the model (9b: Qwen3.5, small: 8 layers, tiny: 4)",
            show_default="7b with --gpu, else tiny",
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="repeat less and compile nothing")] = False,
    section: Annotated[
        list[str], Option(metavar="NAME", help="run only this section (repeatable)", show_default="all but eager")
    ] = [],  # noqa: B006 -- typer copies it
    write: Annotated[
        Path | None, Option(metavar="FILE", help="write the table to FILE.md, and the same as JSON to FILE.json")
    ] = None,
) -> None:
    """Measure a device with a model of random weights, without files or network, in less than eight minutes.

    It measures the bandwidth that decoding uses, the time to the first token, the cost of interventions and readouts, the
    correctness of half precision, kernels and waits of a step, clients in a closed loop through the engine and over HTTP, a
    server's start, and memory.
    """
    from steering.bench.rows import as_json, as_page
    from steering.bench.run import run, usual
    from steering.bench.sections import SECTIONS
    from steering.bench.trial import Trial

    if gpu:
        import torch

        if not torch.cuda.is_available():
            raise ValueError(f"torch {torch.__version__} sees no GPU; without --gpu the CPU is measured")
    trial = Trial(shape or ("7b" if gpu else "tiny"), "cuda" if gpu else "cpu", "bfloat16" if gpu else "float32", quick)
    if write is not None and not write.parent.is_dir():
        raise ValueError(f"there is no folder {write.parent} for {write.name}")
    unknown = [name for name in section if name not in SECTIONS]
    if unknown:
        raise ValueError(f"there is no section {unknown[0]!r}: {', '.join(SECTIONS)}")
    results = run(section or usual(), trial, lambda name: typer.echo(f"{name} ...", err=True))
    page = as_page(results.machine, results.rows)
    if write is not None:
        write.with_suffix(".md").write_text(page, encoding="utf-8")
        write.with_suffix(".json").write_text(as_json(results.machine, results.rows), encoding="utf-8")
    sys.stdout.write(page)
