"""`helmsight eval mc2`: modality preference, plain and changed, with the paper's ablations."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from typer import Option

from probes.conflicts.options import Data, Images, Instructions, MC2File, Tasks
from probes.harness.benchmark import Benchmark, run_of
from probes.harness.options import VECTOR, Defaults
from probes.harness.session import Setup

if TYPE_CHECKING:
    from probes.mc2.run import MC2Options


class ConditionName(StrEnum):
    """The kinds of condition."""

    PLAIN = "plain"
    INSTRUCT = "instruct"
    CHAIN = "chain"
    SHOTS = "shots"
    STEER = "steer"
    BOTH = "both"


class CriterionName(StrEnum):
    """The criteria of automatic steering."""

    DROP = "drop"
    SURPRISE = "surprise"


class AblationName(StrEnum):
    """The paper's ablations."""

    SAMPLES = "samples"
    TASKS = "tasks"
    STRENGTH = "strength"
    LATENCY = "latency"


# The names of `mc2.evaluate` and of the engine, which import torch, and the paper's Tables 8 to 11.
KINDS, CRITERIA, ABLATIONS = list(ConditionName), list(CriterionName), list(AblationName)
USUAL: list[ConditionName] = [kind for kind in KINDS if kind != ConditionName.BOTH]
SEVERITIES = [0.3, 0.5, 0.7]


def _options(
    setup: Setup,
    defaults: Defaults,
    *,
    mc2: MC2File = None,
    images: Images = None,
    tasks: Tasks = None,
    wording: Instructions = "paper",
    conditions: Annotated[list[ConditionName], Option(
        metavar="NAME...", help=f"of {', '.join(KINDS)}; 'both' is instructed and steered (default: all but {KINDS[-1]})",
        show_default=False,
    )] = USUAL,
    vector: Annotated[str, Option(metavar="NAME|FILE", help="vector to steer with")] = VECTOR,
    strength: Annotated[float, Option(
        help="strength of steering, 1.0 is the calibrated one; --ablate strength tries strengths in published units",
    )] = 1.0,
    random_directions: Annotated[int, Option(min=0, metavar="K", help="random control directions of the same norm")] = 0,
    ablate: Annotated[list[AblationName] | None, Option(
        metavar="WHAT...", help=f"also run the paper's ablations, of {', '.join(ABLATIONS)} (its Tables 8 to 11)",
    )] = None,
    lens: Annotated[bool, Option(
        "--lens", help="also read the logits of both options from each layer: plain, instructed, steered",
    )] = False,
    auto: Annotated[list[CriterionName] | None, Option(
        metavar="[CRITERION]...", help="also steer in the direction that a criterion chooses, on degraded copies of the "
        f"samples (Table 12): of {', '.join(CRITERIA)} (default: both)",
    )] = None,
    severity: Annotated[list[float], Option(
        metavar="S...", help="severities of that degradation, from 0 to 1 (nothing is left)",
    )] = SEVERITIES,
) -> MC2Options:  # fmt: skip
    from probes.mc2.run import MC2Options

    return MC2Options(
        data=Data.of(defaults, mc2, images, tasks, setup.seed),
        conditions=tuple(condition.value for condition in conditions),
        wording=wording,
        vector=vector,
        folders=defaults.vectors,
        strength=strength,
        random_directions=random_directions,
        ablate=tuple(ablation.value for ablation in ablate or ()),
        lens=lens,
        auto=None if auto is None else tuple(criterion.value for criterion in auto),
        severities=tuple(severity),
        inside=setup.base_url is None,
    )


BENCHMARK = Benchmark(
    name="mc2",
    help="modality preference on conflicts, with and without interventions",
    description="Ask questions whose image and text conflict, in both orders of their options: plainly, instructed, with "
    "a chain of thought, with four solved examples, and steered.",
    limit=400,
    options=_options,
    run=run_of("probes.mc2.run"),
)
