"""`helmsight bench`: what a device makes of a model, in one table."""

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
    gpu: Annotated[bool, Option("--gpu", help="on the first GPU, in bfloat16; else on the CPU, in float32")] = False,
    shape: Annotated[
        Literal["7b", "small", "tiny"] | None,
        Option(
            help="how large the model is (small: 8 layers, tiny: 4)",
            show_default="7b with --gpu, else tiny",
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="fewer repeats, and nothing is compiled")] = False,
    section: Annotated[
        list[str], Option(metavar="NAME", help="run this section alone (repeatable)", show_default="all but eager")
    ] = [],  # noqa: B006 -- typer copies it
    write: Annotated[
        Path | None, Option(metavar="FILE", help="keep the table as FILE.md, and the same as FILE.json")
    ] = None,
) -> None:
    """Measure what a device makes of a model of random weights, made there: the bandwidth that decoding uses, the time to
    the first token, what interventions and readouts cost, whether half precision is right, kernels and waits of a step,
    callers in a closed loop through the engine and over HTTP, a server's start, memory. Needs no file and no network, and
    less than eight minutes."""
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
    found = run(section or usual(), trial, lambda name: typer.echo(f"{name} ...", err=True))
    page = as_page(found.machine, found.rows)
    if write is not None:
        write.with_suffix(".md").write_text(page, encoding="utf-8")
        write.with_suffix(".json").write_text(as_json(found.machine, found.rows), encoding="utf-8")
    sys.stdout.write(page)
