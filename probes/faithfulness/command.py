"""`helmsight eval faithfulness`: the inside of a model while it says true and false answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import Defaults, Noise, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.faithfulness.run import ToldOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    data: Annotated[
        str | None,
        sample_option(
            metavar="FILE",
            help="JSON Lines with images, question, faithful, unfaithful (default: those of the demo world)",
        ),
    ] = None,
    noise: Noise = 0.0,
) -> ToldOptions:
    from probes.faithfulness.run import ToldOptions

    return ToldOptions(data, noise, defaults.draw.get("faithfulness"))


BENCHMARK = Benchmark(
    name="faithfulness",
    help="the hidden states and attention of a model during faithful and unfaithful answers",
    description="Force a faithful and an unfaithful answer to every question, and compare drift, residual stream, "
    "divergence and neurons by layer, and attention by token.",
    limit=200,
    options=_options,
    run=run_of("probes.faithfulness.run"),
)
