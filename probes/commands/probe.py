"""`helmsight probe`: build a vector, calibrate it, and say what was found; `helmsight probe reliability`."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
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
    write_json,
)

if TYPE_CHECKING:
    from probes.vector.calibrate import Budget
    from steering import SteeringVector

ASKED = 64
"""Probe samples on which it is asked whether the model follows the instructions, and whether wordings agree."""


def register(subparsers: Any, defaults: Defaults) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "probe",
        help="build a modality-preference vector for a model",
        description="Build a steering vector from conflicting samples, calibrate its dose on others, and save it with a "
        "report. Run again after an interruption, it goes on where it was.",
    )
    parser.add_argument(
        "part", nargs="?", choices=("reliability",),
        help="instead of building anything, tell which modality the answers of each task rest on, right or wrong: a "
        "question votes for the one without which its answer's probability drops more",
    )  # fmt: skip
    add_model(parser, defaults)
    add_data(parser)
    parser.add_argument(
        "--samples", type=positive, default=128, metavar="N", help="samples to probe (default %(default)s)"
    )
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="only samples of these tasks")
    add_wording(parser)
    parser.add_argument(
        "--position", type=int, default=-1, metavar="P",
        help="token whose state is read, from the prompt's end: -1 the last one as in the paper, -2 the one before as in "
        "the authors' plots (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-size", choices=("queries", "mean"), default="queries",
        help="what the weight takes for the direction's size: the mean over queries of |v(q)|, or |mean v| "
        "(default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--weight-states", choices=("plain", "instructed"), default="plain",
        help="the prompts whose states the direction is given the size of (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--layers", type=int, nargs="+", metavar="L", help="only consider these layers, counted from 0")
    parser.add_argument("--name", default=VECTOR, help="name of the vector (default %(default)s)")
    parser.add_argument(
        "--out", metavar="FILE",
        help="where to save it (default: NAME.safetensors in the first folder of vectors, ~/.helmsight/vectors, where "
        "'serve', 'vectors' and 'eval' find it before the model's own)",
    )  # fmt: skip
    parser.add_argument(
        "--replace", action="store_true", help="write over a vector, or over a calibration, that is there already"
    )
    parser.add_argument(
        "--report", metavar="DIR",
        help="folder of the report, and of what a run that was stopped goes on from (default: build/probe/NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="save the vector also where no reliable direction was found"
    )
    parser.add_argument(
        "--calibrate", action=argparse.BooleanOptionalAction, default=True,
        help="find the layer and dose that steer both ways with the least damage",
    )  # fmt: skip
    parser.add_argument(
        "--calibration-samples", type=positive, default=64, metavar="N", help="samples for that (default %(default)s)"
    )
    parser.add_argument(
        "--doses", type=float, nargs="+", metavar="D", help="shares of the published weight that are tried"
    )
    parser.add_argument(
        "--budget", nargs="+", default=[], metavar="NAME=MOST",
        help="most damage allowed: others (rise of their share), accuracy (fall), kl (nats), repetition (rise)",
    )  # fmt: skip
    parser.add_argument(
        "--states", type=int, default=100, metavar="N",
        help="samples of the plot of states, 0 for none (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-sage", action="store_true",
        help="measure the thresholds of SAGE's Think instead, on --samples prompts, and keep them in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-sinks", action="store_true",
        help="measure which places of images attract attention anyway instead, and keep that in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-flags", action="store_true",
        help="choose the thresholds of the flags instead, on --samples questions with clean and noisy pictures, measure how "
        "often they raise each on right and on wrong answers, and keep both in MODEL",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate-surprise", action="store_true",
        help="measure how surprising clean text contexts are instead, the bound of steering 'auto' by surprise, and keep it "
        "in MODEL",
    )  # fmt: skip
    parser.add_argument("--markdown", metavar="FILE", help="with --calibrate-flags: write its report here")
    parser.add_argument("--json", metavar="FILE", help="with reliability: write the votes here")
    parser.set_defaults(func=guarded(_run, defaults))


def _run(arguments: argparse.Namespace, defaults: Defaults) -> int:
    if arguments.part == "reliability":
        return _reliability(arguments, defaults)
    if arguments.json:
        raise ValueError("--json goes with 'probe reliability'; a probe's numbers are in the report.json of --report")
    if arguments.markdown and not arguments.calibrate_flags:
        raise ValueError("--markdown goes with --calibrate-flags; a probe's report is in the folder of --report")
    if arguments.calibrate_flags:
        return _calibrate_flags(arguments, defaults)
    if arguments.calibrate_sage or arguments.calibrate_sinks or arguments.calibrate_surprise:
        return _calibrate(arguments, defaults)
    return _probe(arguments, defaults)


def _probe(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from probes.answering.engine import InProcess
    from probes.harness.ledger import Remembering
    from probes.vector import report as vector_report
    from probes.vector.agreement import agreement
    from probes.vector.build import Recipe, build
    from probes.vector.calibrate import DOSES, calibrate
    from probes.vector.projection import project
    from probes.vector.verdict import doubts, followed
    from steering import NAME

    if not NAME.fullmatch(arguments.name):
        raise ValueError(f"--name {arguments.name!r} must match {NAME.pattern}")
    out = _place(arguments, defaults)
    recipe = Recipe(arguments.wording, arguments.position, arguments.weight_size, arguments.weight_states)
    budget, folder = _budget(arguments.budget), Path(arguments.report or Path("build/probe") / arguments.name)
    held_back = arguments.calibration_samples if arguments.calibrate else 0
    samples = samples_of(arguments, defaults, arguments.samples + held_back, PROBE_SEEDS + arguments.seed)
    if len(samples) < arguments.samples + held_back:
        held_back = min(held_back, len(samples) // 3)
    used = samples[: len(samples) - held_back]
    engine = engine_of(arguments)
    answerer = Remembering(InProcess(engine), folder / "answers.jsonl")
    quiet, seed = arguments.quiet, arguments.seed
    vector = build(
        engine, used, name=arguments.name, layers=arguments.layers, recipe=recipe, seed=seed,
        state=folder / "states.safetensors", quiet=quiet,
    )  # fmt: skip
    instructed = followed(answerer, used[:ASKED], recipe.wording, seed=seed, quiet=quiet)
    agreeing = agreement(engine, used[:ASKED], recipe, seed=seed, quiet=quiet)
    doubtful = doubts(vector, instructed)
    if held_back and (arguments.force or not doubtful):  # of what is no direction no dose needs to be known
        vector = calibrate(
            engine, vector, samples[len(used) :], layers=arguments.layers, doses=arguments.doses or DOSES,
            budget=budget, answerer=answerer, quiet=quiet,
        )  # fmt: skip
        doubtful = doubts(vector, instructed)
    found = {
        "instructed": instructed.to_json(), "doubts": doubtful, "reliable": not doubtful,
        "agreement_across": agreeing.to_json(),
    }  # fmt: skip
    # An evaluation leaves these samples out.
    vector = replace(vector, info=vector.info | found | {"made_from": [sample.id for sample in samples]})
    projection = None
    if arguments.states > 0:
        projection = project(engine, used[: arguments.states], vector.layers[0], recipe, seed=seed, quiet=quiet)
    page, data = vector_report.report(vector, engine.mllm.name, instructed, doubtful, projection, agreeing)
    page.write(folder, data)
    print(f"report: {folder / 'report.html'}")
    if doubtful and not arguments.force:
        raise ValueError(
            f"No reliable direction, so {out} is not written (--force writes it anyway). {' '.join(doubtful)}"
        )
    _refuse_to_replace(out, arguments)  # what another program wrote meanwhile is not lost either
    vector.save(out)
    _print_vector(vector, out)
    hidden = Path(arguments.model) / "vectors" / f"{arguments.name}.safetensors"
    if arguments.out is None and hidden.exists():
        print(f"It is found before the model's own, {hidden}; to go back to that one, remove {out}")
    return 0


def _place(arguments: argparse.Namespace, defaults: Defaults) -> Path:
    """Where the vector goes: a place that can be written to, which is known before the work begins."""
    folders = defaults.vectors()
    if arguments.out is None and not folders:
        raise ValueError("there is no folder of vectors to put it into: give --out")
    out = Path(arguments.out).expanduser() if arguments.out else folders[0] / f"{arguments.name}.safetensors"
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder; name the file")
    _refuse_to_replace(out, arguments)
    out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writable(out.parent)
    return out


def _refuse_to_replace(out: Path, arguments: argparse.Namespace) -> None:
    if out.exists() and not arguments.replace:
        raise FileExistsError(f"{out} exists already; --replace writes over it, --name or --out names another file")


def _check_writable(folder: Path) -> None:
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to")


def _budget(parts: list[str]) -> Budget:
    from probes.vector.calibrate import Budget

    names = {field.name for field in fields(Budget)}
    given = {}
    for part in parts:
        name, _, value = part.partition("=")
        try:
            given[name] = float(value)
        except ValueError:
            given[name] = -1.0
        if name not in names or not 0 <= given[name] < float("inf"):
            raise ValueError(f"--budget {part!r}: write NAME=MOST, with a name of {', '.join(sorted(names))}")
    return Budget(**given)


def _print_vector(vector: SteeringVector, path: Path) -> None:
    info = vector.info
    print(f"{path}: {vector.name}, {info['samples']} pairs, layers by score {info['ranking']}")
    if info["doubts"]:
        print("NOT RELIABLE: " + " ".join(info["doubts"]))
    layer = vector.layers[0]
    _print_weight(vector, layer)
    for name, cosines in info["agreement_across"]["cosines"].items():
        print(f"cosine at layer {layer} with the direction of wording and position {name}: {cosines[layer]:.3f}")
    if "calibration" not in info:
        print(f"layer {layer}, published weight {float(vector.weight[layer]):.4g}, not calibrated")
        return
    calibration = info["calibration"]
    chosen, low_high = calibration["chosen"], "{:g} to {:g}".format(*calibration["range"])
    print(
        f"layer {calibration['layer']}, strength 1.0 = {calibration['factor']:g} of the published weight, range {low_high}; "
        f"Vision Ratio {_ratio(calibration['baseline']['plain'])} plain, {_ratio(chosen['vision'])} toward vision, "
        f"{_ratio(chosen['text'])} toward text"
    )


def _print_weight(vector: SteeringVector, layer: int) -> None:
    """The magnitudes that the published weight aligns, and which of them it does."""
    states, sizes = (vector.info["magnitudes"][name] for name in ("states", "direction"))
    recipe = vector.info["recipe"]
    print(
        f"layer {layer}: mean |h| {states['plain'][layer]:.4g} plain, {states['instructed'][layer]:.4g} instructed; "
        f"mean |v| {sizes['queries'][layer]:.4g} over queries, {sizes['mean'][layer]:.4g} of their mean; published weight "
        f"{float(vector.weight[layer]) / (vector.published or 1.0):.4g} ({recipe['states']} states over {recipe['size']})"
    )


def _ratio(shares: dict[str, Any]) -> str:
    ratio = shares["vision_ratio"]
    return "-" if ratio is None else f"{ratio:.3f}"


def _calibration_folder(arguments: argparse.Namespace, part: str) -> Path:
    """The model's folder, where a part of the calibration may be written; raises before there was any work."""
    from steering.calibration import FILE, measured

    folder = Path(arguments.model)
    if not folder.is_dir():
        raise ValueError(f"--model {arguments.model}: the calibration is kept in the model's folder, and this is none")
    if part in measured(folder) and not arguments.replace:
        raise FileExistsError(f"{folder / FILE} has the {part} already; --replace measures it anew")
    _check_writable(folder)
    return folder


def _calibrate(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from probes.calibration.measure import calibrate_sinks, calibrate_surprise, calibrate_think
    from steering.calibration import SURPRISE

    part, measure = "divergence", calibrate_think
    if arguments.calibrate_sinks:
        part, measure = "sinks", calibrate_sinks
    elif arguments.calibrate_surprise:
        part, measure = "surprise", calibrate_surprise
    folder = _calibration_folder(arguments, part)
    samples = samples_of(arguments, defaults, arguments.samples, PROBE_SEEDS + arguments.seed)
    calibration = measure(engine_of(arguments), samples, arguments.quiet)
    path = calibration.save(folder)
    if arguments.calibrate_surprise:
        bound = f"{calibration.surprise:.2f} nats"
        print(f"{path}: {SURPRISE:.0%} of {calibration.contexts} contexts surprise by at most {bound}")
        return 0
    if arguments.calibrate_sinks:
        print(f"{path}: attention to places of {calibration.images} images, greatest by layer, in average patches")
        for layer, places in enumerate(calibration.sinks or ()):
            print(f"layer {layer:>3}  {max(max(row) for row in places):.2f}")
        return 0
    print(f"{path}: divergence on {calibration.tokens} tokens of {calibration.samples} prompts")
    for layer, quantiles in enumerate(calibration.divergence or ()):
        print(f"layer {layer:>3}  0.9 quantile {quantiles[90]:.4f}")
    return 0


def _calibrate_flags(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from probes.calibration import flags
    from probes.calibration.measure import calibrate_flags
    from steering.files import write_atomically

    folder = _calibration_folder(arguments, "flags")
    samples = samples_of(arguments, defaults, arguments.samples, PROBE_SEEDS + arguments.seed)
    engine = engine_of(arguments)
    calibration, answers = calibrate_flags(engine, samples, arguments.seed, arguments.quiet)
    assert calibration.flags is not None
    page = flags.report(engine.mllm.name, answers, calibration.flags)
    path = calibration.save(folder)
    if arguments.markdown:
        write_atomically(arguments.markdown, page.markdown().encode())
    print(page.markdown())
    print(f"{path}: thresholds of the flags from {calibration.flags.answers} answers")
    return 0


def _reliability(arguments: argparse.Namespace, defaults: Defaults) -> int:
    from rich.table import Table

    from probes.mc2.automatic import task_reliability

    samples = samples_of(arguments, defaults, arguments.samples, arguments.seed)
    found = task_reliability(engine_of(arguments), samples, quiet=arguments.quiet)
    if arguments.json:
        write_json(arguments.json, {task: one.to_json() for task, one in found.items()})
    table = Table(title=f"Which modality answers rest on: {len(samples)} samples, both orders", title_justify="left")
    for name in ("task", "votes for vision", "for text", "none", "drop without images", "without context", "rests on"):
        table.add_column(name, justify="left" if name in ("task", "rests on") else "right")
    for task, one in found.items():
        votes = [str(one.votes.get(side, 0)) for side in ("vision", "text", "none")]
        table.add_row(task, *votes, f"{one.drop_vision:.3f}", f"{one.drop_text:.3f}", one.rests_on or "-")
    show(table)
    return 0
