"""A benchmark in one file: whether a model says of what colour a picture is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from PIL import Image
from typer import Option

from probes.answering.base import Chat, Reply
from probes.harness.benchmark import Benchmark, Findings
from probes.harness.bootstrap import Share, Tallies
from probes.harness.comparison import BASELINE, SampleSet, compare
from probes.harness.comparison_tables import READING, power, table
from probes.harness.options import Defaults
from probes.harness.session import Session, Setup
from probes.reporting.report import Report
from steering import Icd, Options, See

COLOURS = ["red", "green"]
CONDITIONS: dict[str, tuple[Options, ...]] = {BASELINE: (), "See": (See(alpha=0.5),), "ICD": (Icd(),)}


@dataclass(frozen=True)
class ToyOptions:
    """Colours that are asked about in turn."""

    colours: tuple[str, ...]

    def __post_init__(self) -> None:
        if "beige" in self.colours:
            raise ValueError("--colours: nobody knows what is beige")


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    colours: Annotated[list[str], Option(metavar="NAME...", help="asked about in turn")] = COLOURS,
) -> ToyOptions:
    return ToyOptions(tuple(colours))


def _chats(colour: str) -> Sequence[Chat]:
    picture: dict[str, Any] = {"type": "image", "image": Image.new("RGB", (56, 56), colour)}
    return [[{"role": "user", "content": [picture, {"type": "text", "text": f"Is it {colour}?"}]}]]


def _tally(colour: str, replies: Sequence[Reply]) -> dict[str, float]:
    (reply,) = replies
    return {"n": 1.0, "named": float(colour in reply.text), "letters": float(len(reply.text))}


def _scores(sums: Tallies) -> dict[str, np.ndarray]:
    return {"named": sums["named"] / sums["n"], "letters": sums["letters"] / sums["n"]}


def _run(options: ToyOptions, session: Session) -> Findings:
    setup = session.setup
    samples = [options.colours[i % len(options.colours)] for i in range(setup.limit)]
    part = SampleSet(
        "colours",
        samples,
        _chats,
        _tally,
        _scores,
        {"named": Share("named", "n")},
        setting=lambda colour: colour,
        cluster=hash,
    )
    results = compare(session.answerer, CONDITIONS, [part], max_tokens=4, quiet=setup.quiet)
    page = Report(f"Colours on {session.model}")
    page.text(READING)
    power(page, results, "colours", "named", "pictures")
    table(page, results, "colours", ("named", "letters"), ["all", *options.colours])
    return Findings(page, {"model": session.model, "samples": len(samples)}, results)


BENCHMARK = Benchmark("toy", "colours", "Ask of what colour pictures are.", 4, _options, _run, unit="pictures")
