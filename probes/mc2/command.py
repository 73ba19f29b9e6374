"""`helmsight eval mc2`: modality preference, plain and changed, with the paper's ablations."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probes.commands.common import (
    PROBE_SEEDS,
    VECTOR,
    Defaults,
    add_data,
    add_model,
    add_wording,
    engine_of,
    guarded,
    positive,
    samples_of,
    show,
    vector_of,
    write_json,
)

if TYPE_CHECKING:
    from probes.answering.base import Answerer
    from probes.answering.endpoint import Endpoint
    from probes.conflicts.samples import Sample
    from probes.harness.report import Report
    from probes.mc2.evaluate import Evaluation, Steering
    from steering import Criterion, Engine, SteeringVector

KINDS = ("plain", "instruct", "chain", "shots", "steer")  # those of `probes.mc2.evaluate`, which brings torch
CRITERIA = ("drop", "surprise")  # those of `steering.reliability`, likewise
SEVERITIES = (0.3, 0.5, 0.7)
ABLATIONS = ("samples", "tasks", "strength", "latency")
SHOTS = 4
PROBED, LEAST_PROBED = 250, 25
"""Samples of the ablations that build vectors, at most and at least."""


def register(benchmarks: Any, defaults: Defaults) -> None:
    """Add the benchmark."""
    parser = benchmarks.add_parser(
        "mc2",
        help="modality preference on conflicts, plain and changed",
        description="Ask conflicting samples in both option orders: plainly, instructed, with a chain of thought, with four "
        "solved examples, steered. Run again after an interruption, it goes on where it was.",
    )
    add_model(parser, defaults)
    add_data(parser)
    add_wording(parser)
    parser.add_argument("--limit", type=positive, default=400, metavar="N", help="samples (default %(default)s)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only samples of these tasks")
    parser.add_argument(
        "--conditions", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME",
        help=f"of {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--vector", default=VECTOR, metavar="NAME|FILE", help="vector to steer with (default %(default)s)"
    )
    parser.add_argument(
        "--strength", type=float, default=1.0,
        help="1.0 is the calibrated dose (default %(default)s); --ablate strength tries strengths in published units",
    )  # fmt: skip
    parser.add_argument("--random-directions", type=int, default=0, metavar="K", help="controls of the same dose")
    parser.add_argument(
        "--ablate", nargs="+", choices=ABLATIONS, default=[], metavar="WHAT",
        help=f"also the paper's ablations, of {', '.join(ABLATIONS)} (its Tables 8 to 11)",
    )  # fmt: skip
    parser.add_argument(
        "--auto", nargs="*", choices=CRITERIA, metavar="CRITERION",
        help="also steering whose way is found by a criterion, on degraded copies of the samples (Table 12): of "
        f"{', '.join(CRITERIA)} (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--severity", type=float, nargs="+", default=list(SEVERITIES), metavar="S",
        help="of that degradation, 0 to 1 (nothing is left); default: " + " ".join(map(str, SEVERITIES)),
    )  # fmt: skip
    parser.add_argument(
        "--base-url", metavar="URL",
        help="ask this OpenAI-compatible server in place of a model in this process; --model then names its model, the "
        "environment's OPENAI_API_KEY its key",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="DIR", default="build/mc2",
        help="folder of the report, and of the answers that a run that was stopped goes on from (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the conditions' shares here as well")
    parser.set_defaults(func=guarded(_run, defaults))


def _run(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from probes.harness.ledger import Remembering
    from probes.harness.report import Report
    from probes.mc2 import report as mc2_report
    from probes.mc2.evaluate import Steering, evaluate

    _check(arguments)
    endpoint = _endpoint(arguments, defaults)
    load = functools.cache(functools.partial(engine_of, arguments))
    vector = _vector(arguments, defaults, endpoint, lambda: load().mllm.fingerprint)
    made_from = () if vector is None else vector.info.get("made_from", ())
    examples = SHOTS if "shots" in arguments.conditions else 0
    drawn = samples_of(arguments, defaults, arguments.limit + examples, arguments.seed, without=made_from)
    count = max(0, len(drawn) - examples)
    samples, shots = drawn[:count], drawn[count:]
    if not samples:
        raise ValueError(f"{len(drawn)} samples are too few.")
    probe = _probe_samples(arguments, defaults, drawn)
    engine, asked = _answerer(endpoint, load)
    criteria = _criteria(arguments, engine)
    steering = None if vector is None else Steering(vector, arguments.strength)
    folder = Path(arguments.out)
    answerer = Remembering(asked, folder / "answers.jsonl")
    evaluation = evaluate(
        answerer, samples, steering=steering, kinds=arguments.conditions, shots=shots,
        wording=arguments.wording, random_directions=arguments.random_directions, seed=arguments.seed, quiet=arguments.quiet,
    )  # fmt: skip
    model = engine.mllm.name if engine is not None else str(arguments.base_url)
    page = Report(f"Modality preference of {model}")
    about = {"model": model, "samples": len(samples), "seed": arguments.seed, "mc2": bool(arguments.mc2)}
    about["wording"] = arguments.wording
    if vector is not None:
        published = None if vector.published is None else round(arguments.strength * vector.published, 6)
        about |= {"vector": vector.name, "strength": arguments.strength, "published strength": published}
    page.text(", ".join(f"{name} {value}" for name, value in about.items()))
    mc2_report.conditions(page, evaluation)
    data: dict[str, Any] = {"about": about, "conditions": evaluation.to_json()}
    if steering is not None:
        _more(arguments, engine, answerer, probe, samples, steering, page, data)
        if criteria:
            _automatic(arguments, answerer, samples, steering, criteria, page, data)
    page.write(folder, data)
    if arguments.json:
        write_json(arguments.json, evaluation.to_json())
    print_table(evaluation, f"{model}: {len(samples)} samples, seed {arguments.seed}")
    print(f"report: {folder / 'report.html'}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    wants_vector = arguments.ablate or arguments.auto is not None or arguments.random_directions
    if wants_vector and "steer" not in arguments.conditions:
        raise ValueError("--ablate, --auto and --random-directions go with the condition 'steer'")
    if arguments.base_url and (inside := {"samples", "tasks", "latency"} & set(arguments.ablate)):
        raise ValueError(f"--ablate {' '.join(sorted(inside))} needs the model in this process, not --base-url")
    for severity in arguments.severity:
        if not 0 <= severity <= 1:
            raise ValueError(f"--severity must be from 0 to 1, not {severity:g}")


def _endpoint(arguments: argparse.Namespace, defaults: Defaults) -> Endpoint | None:
    from probes.answering.endpoint import Endpoint

    if not arguments.base_url:
        return None
    return Endpoint(arguments.base_url, model=None if arguments.model == defaults.model else arguments.model)


def _answerer(endpoint: Endpoint | None, load: Callable[[], Engine]) -> tuple[Engine | None, Answerer]:
    """The server, or the model in this process with its engine."""
    from probes.answering.engine import InProcess

    if endpoint is not None:
        return None, endpoint
    engine = load()
    return engine, InProcess(engine)


def _vector(
    arguments: argparse.Namespace, defaults: Defaults, endpoint: Endpoint | None, fingerprint: Callable[[], str]
) -> SteeringVector | None:
    """The vector to steer with, where anything is to be steered."""
    if "steer" not in arguments.conditions:
        return None
    if endpoint is not None:
        return endpoint.vector(arguments.vector)
    return vector_of(arguments.vector, arguments.model, defaults.vectors(), fingerprint)


def _probe_samples(arguments: argparse.Namespace, defaults: Defaults, taken: list[Sample]) -> list[Sample]:
    """What the ablations build vectors from, others than those that are asked."""
    if not {"samples", "tasks"} & set(arguments.ablate):
        return []
    without = [sample.id for sample in taken]
    probe = samples_of(arguments, defaults, PROBED, PROBE_SEEDS + arguments.seed, without=without)
    if len(probe) < LEAST_PROBED:
        raise ValueError(
            f"--ablate samples and tasks build vectors from at least {LEAST_PROBED} samples besides those that are asked; "
            f"there are {len(probe)}."
        )
    return probe


def _more(
    arguments: argparse.Namespace,
    engine: Engine | None,
    answerer: Answerer,
    probe: list[Sample],
    samples: list[Sample],
    steering: Steering,
    page: Report,
    data: dict[str, Any],
) -> None:
    """The ablations that were asked for, each added to the report."""
    from probes.mc2 import ablate
    from probes.mc2 import report as mc2_report

    options: dict[str, Any] = {"seed": arguments.seed, "quiet": arguments.quiet}
    if engine is not None and "samples" in arguments.ablate:
        sizes = ablate.by_samples(engine, answerer, probe, samples, steering, **options)
        mc2_report.samples(page, sizes)
        data["samples"] = {str(size): row.to_json() for size, row in sizes.items()}
    if engine is not None and "tasks" in arguments.ablate:
        tasks = ablate.by_tasks(engine, answerer, probe, samples, steering, **options)
        mc2_report.tasks(page, tasks)
        data["tasks"] = {task: row.to_json() for task, row in tasks.items()}
    if "strength" in arguments.ablate:
        strengths = ablate.by_strength(answerer, samples, steering, **options)
        bend = ablate.knee(strengths)
        published = steering.vector.published
        mc2_report.strength(page, strengths, bend, published)
        data["strength"] = {
            "unit": "own" if published is None else "published", "published": published, "knee": bend.to_json(),
            "rows": {f"{s:g}": row.to_json() for s, row in strengths.items()},
        }  # fmt: skip
    if engine is not None and "latency" in arguments.ablate:
        taken_each = ablate.latency(engine, samples[:100], steering, quiet=arguments.quiet)
        mc2_report.latency(page, taken_each)
        data["latency"] = {name: one.to_json() for name, one in taken_each.items()}


def _criteria(arguments: argparse.Namespace, engine: Engine | None) -> dict[str, Criterion]:
    """The criteria of --auto by their names in the report. The bound of the model in this process is stated, so that answers
    that were kept are not taken for those of another bound; that of a server is its own."""
    from probes.mc2.automatic import CRITERIA
    from steering.surprise import bound_of

    if arguments.auto is None:
        return {}
    chosen = {name: one for name, one in CRITERIA.items() if not arguments.auto or one.name in arguments.auto}
    if engine is None:
        return chosen
    return {
        name: replace(one, bound=bound_of(engine.mllm, None)) if one.name == "surprise" else one
        for name, one in chosen.items()
    }


def _automatic(
    arguments: argparse.Namespace,
    answerer: Answerer,
    samples: list[Sample],
    steering: Steering,
    criteria: dict[str, Criterion],
    page: Report,
    data: dict[str, Any],
) -> None:
    """Steering whose way is found, added to the report."""
    from probes.mc2 import report as mc2_report
    from probes.mc2.automatic import automatic

    found = automatic(
        answerer, samples, steering, criteria=criteria, severities=arguments.severity, seed=arguments.seed,
        quiet=arguments.quiet,
    )  # fmt: skip
    mc2_report.automatic(page, found)
    data["auto"] = found.to_json() | {"bounds": {name: one.bound for name, one in criteria.items()}}


def print_table(evaluation: Evaluation, title: str) -> None:
    """The conditions as a table on standard output."""
    from rich.table import Table

    from probes.mc2.report import TITLES

    table = Table(title=title, title_justify="left")
    for name in ("condition", "S_v", "S_t", "S_o", "Vision Ratio", "image only", "context only", "attention"):
        table.add_column(name, justify="left" if name == "condition" else "right", no_wrap=True)
    for name, one in evaluation.conditions.items():
        shares = one.shares
        values = (shares.s_vision, shares.s_text, shares.s_others, shares.vision_ratio)
        table.add_row(TITLES[name], *map(_number, (*values, one.image_only, one.context_only, one.attention_ratio)))
    if evaluation.random:
        table.add_section()
        spreads = evaluation.random_spread().values()
        for row in ("min", "mean", "max"):
            values_of = [_number(one[row]) for one in spreads]
            table.add_row(f"{len(evaluation.random)} random, {row}", *values_of, "-", "-", "-")
    show(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
