"""`helmsight eval spd-faith`: the faithfulness of a model's description of the differences between two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import Defaults, Names, Noise, Texts, sample_option
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.spd.run import SpdOptions


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    data: Annotated[
        str | None,
        sample_option(
            metavar="PATH",
            help="the published pairs, a folder of folders or a file of rows; the demo world by default",
        ),
    ] = None,
    images: Annotated[
        str | None,
        sample_option(metavar="DIR", help="folder of the images of a file of rows (default: its own folder)"),
    ] = None,
    several: Annotated[
        int | None,
        sample_option(min=0, metavar="N", help="pairs with several differences (default: as many as with one)"),
    ] = None,
    noise: Noise = 0.0,
    merged: Annotated[bool, Option("--merged", help="show both images as one, the original above")] = False,
    as_json: Annotated[
        bool, Option("--as-json", help="ask for the differences as a JSON list, as the paper does of large models")
    ] = False,
    max_tokens: Annotated[int, Option(min=1, metavar="N", help="largest number of tokens of an answer")] = 64,
    judge_url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="judge the claims with the model of this OpenAI-compatible server instead of rules; its key is in the "
            "variable JUDGE_API_KEY, or OPENAI_API_KEY",
        ),
    ] = None,
    judge_model: Annotated[
        str | None, Option(metavar="NAME", help="model name of the judge (default: the server's only model)")
    ] = None,
    judge_timeout: Annotated[
        float, Option(min=1, metavar="S", help="longest time of an answer of the judge in seconds")
    ] = 90.0,
    conditions: Names = None,
    condition: Texts = None,
) -> SpdOptions:
    from probes.harness.conditions import Wanted
    from probes.spd.asking import OWN, Presentation
    from probes.spd.run import JudgeOptions, SpdOptions

    if judge_model is not None and judge_url is None:
        raise ValueError("--judge-model needs --judge-url, the judge's server")
    return SpdOptions(
        wanted=Wanted.of(conditions, condition, defaults.vectors, dict.fromkeys(OWN, ())),
        data=data,
        images=images,
        demo=defaults.draw.get("spd"),
        several=several,
        noise=noise,
        form=Presentation(merged, as_json, max_tokens),
        judge=None if judge_url is None else JudgeOptions(judge_url, judge_model, judge_timeout),
    )


BENCHMARK = Benchmark(
    name="spd-faith",
    help="faithfulness of descriptions of the differences between two images",
    description="Ask about pairs of images that differ in one thing, by difficulty, or in two to five: are they the "
    "same, are they different, how many differences there are, and which. Ask plainly, with interventions, with hints "
    "and hidden blocks, and by the prompt-level methods that the paper compares SAGE with.",
    limit=120,
    options=_options,
    run=run_of("probes.spd.run"),
    unit="pairs with one difference",
)
