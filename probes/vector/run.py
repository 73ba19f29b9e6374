"""A run of `helmsight probe`, which builds, judges, calibrates, reports and saves a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from probes.answering.base import Answerer
from probes.answering.engine import InProcess
from probes.conflicts.options import PROBE_SEEDS, Data
from probes.conflicts.samples import ConflictSample
from probes.conflicts.words import origin
from probes.harness.ledger import Remembering
from probes.harness.options import ModelOptions, check_writable
from probes.vector import report
from probes.vector.agreement import agreement
from probes.vector.build import Recipe, build
from probes.vector.calibrate import Budget, calibrate
from probes.vector.projection import project
from probes.vector.verdict import doubts, followed, refuse, refuse_to_replace, too_few, unfounded, warnings
from steering import NAME, Engine, SteeringVector, VectorError, VectorStore
from steering.vectors.candidates import CANDIDATES, aligned, candidate_file, side_by_side, undoing, use

ASKED = 64
"""The number of probe samples that test whether the model follows the instructions, and whether wordings agree."""


@dataclass(frozen=True)
class ProbeOptions:
    """The options of a probe.

    samples, calibrated: the number of samples from which the vector is built, and of others on which its strength is chosen,
    0 for none. states: the number of samples plotted. out: the file written. used_from: the folders in which the name is
    looked up, None if an output was named. use: the name is to stand for the new vector at once, which otherwise is a
    candidate. folder: for the report, and for what an interrupted run continues from. Raises ValueError for a name or a file
    that a vector cannot have.
    """

    model: ModelOptions
    data: Data
    name: str
    recipe: Recipe
    samples: int
    calibrated: int
    layers: tuple[int, ...] | None
    strengths: tuple[float, ...]
    budget: Budget
    states: int
    out: Path
    used_from: tuple[Path, ...] | None
    use: bool
    folder: Path
    force: bool
    replace: bool
    quiet: bool

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"--name {self.name!r} must match {NAME.pattern}")
        if self.out.is_dir():
            raise ValueError(f"--out {self.out} is a folder; name a file")


def budget_of(parts: Sequence[str]) -> Budget:
    """Return the budget written as NAME=LIMIT; raise ValueError for any other form."""
    names = {field.name for field in fields(Budget)}
    limits = {}
    for part in parts:
        name, _, value = part.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if name not in names or not 0 <= limits[name] < float("inf"):
            raise ValueError(f"--budget {part!r}: write NAME=LIMIT, with a name of {', '.join(sorted(names))}")
    return Budget(**limits)


def run(options: ProbeOptions) -> None:
    """Build, judge, calibrate, report and save a vector.

    Raises ValueError if no reliable direction was found, unless `force`; for too few samples before the model is loaded.
    """
    refuse_to_replace(options.out, options.replace)  # errors are reported before the work begins, here and below
    options.model.check()
    for folder in (options.out.parent, options.folder):
        check_writable(folder)
    samples = options.data.draw(options.samples + options.calibrated, PROBE_SEEDS + options.data.seed)
    held_back = options.calibrated
    if len(samples) < options.samples + held_back:
        held_back = min(held_back, len(samples) // 3)
    used = samples[: len(samples) - held_back]
    if not options.force:
        refuse(options.out, too_few(len(used), held_back=held_back))
    engine = options.model.engine(options.quiet)
    answerer = Remembering(InProcess(engine), options.folder / "answers.jsonl")
    vector, doubtful = _measured(options, engine, answerer, used, samples[len(used) :])
    if not options.force:
        refuse(options.out, doubtful)
    refuse_to_replace(options.out, options.replace)  # keeps a file that another program wrote meanwhile
    current = _in_use(options, vector)
    backup = _save(options, vector)
    _print_vector(vector, options.out)
    _print_use(options, current, vector, backup)


def _save(options: ProbeOptions, vector: SteeringVector) -> Path | None:
    """Write the vector; return the file that keeps the one that it replaced in use."""
    out = options.out
    folder = out.parent.parent if out.parent.name == CANDIDATES else out.parent
    for path in (folder, out.parent):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not options.use:
        vector.save(out)
        return None
    candidate_file(folder, options.name).parent.mkdir(mode=0o700, exist_ok=True)
    vector.save(candidate_file(folder, options.name))
    return use(folder, options.name)


def _in_use(options: ProbeOptions, vector: SteeringVector) -> SteeringVector | None:
    """Return the vector of this model that the name stands for, None if there is none or an output was named."""
    try:
        current = VectorStore(*options.used_from or (), fingerprint=vector.fingerprint).get(options.name)
    except (VectorError, OSError):
        return None
    return current if current.fingerprint == vector.fingerprint else None


def _print_use(
    options: ProbeOptions, current: SteeringVector | None, vector: SteeringVector, backup: Path | None
) -> None:
    """Print what the name stood for beside the new vector, and what it stands for now."""
    if options.used_from is None:
        return
    if current is not None:
        print("\n".join(aligned([("", "in use", "new"), *side_by_side(current, vector)])))
    name = options.name
    if options.use:
        print(f"{name!r} stands for it from now on, in running servers, too; {undoing(options.out, backup)}")
    else:
        now = (
            "for no vector of this model" if current is None else f"for the vector with digest {current.identity[:16]}"
        )
        print(f"A candidate: {name!r} stands {now} until 'helmsight vectors use {name}'")


def _measured(
    options: ProbeOptions,
    engine: Engine,
    answerer: Answerer,
    used: Sequence[ConflictSample],
    others: Sequence[ConflictSample],
) -> tuple[SteeringVector, list[str]]:
    """Return the vector with all its measurements, which are also reported, and the reasons why it is not reliable."""
    quiet, seed = options.quiet, options.data.seed
    vector = build(
        engine, used, name=options.name, layers=options.layers, recipe=options.recipe, seed=seed,
        state=options.folder / "states.safetensors", quiet=quiet,
    )  # fmt: skip
    instructed = followed(answerer, used[:ASKED], options.recipe.wording, seed=seed, quiet=quiet)
    agreeing = agreement(engine, used[:ASKED], options.recipe, seed=seed, quiet=quiet)
    doubtful = doubts(vector, instructed)
    if others and (options.force or not unfounded(vector)):  # without a direction no strength is needed
        vector = calibrate(
            engine, vector, others, layers=options.layers, strengths=options.strengths, budget=options.budget,
            answerer=answerer, quiet=quiet,
        )  # fmt: skip
        doubtful = doubts(vector, instructed)
    measurements = {
        "instructed": instructed.to_json(), "doubts": doubtful, "reliable": not doubtful,
        "warnings": warnings(vector, instructed),
        "agreement_across": agreeing.to_json(),
    }  # fmt: skip
    # Evaluations leave these samples out.
    vector = replace(
        vector, info=vector.info | measurements | {"made_from": [sample.id for sample in (*used, *others)]}
    )
    projection = None
    if options.states > 0:
        projection = project(engine, used[: options.states], vector.layers[0], options.recipe, seed=seed, quiet=quiet)
    data_from = origin(options.data, [*used, *others], PROBE_SEEDS + seed)
    page, data = report.report(vector, engine.mllm.name, data_from, instructed, doubtful, projection, agreeing)
    page.write(options.folder, data)
    print(f"report: {options.folder / 'report.html'}")
    return vector, doubtful


def _print_vector(vector: SteeringVector, path: Path) -> None:
    info = vector.info
    print(f"{path}: {vector.name}, {info['samples']} pairs, layers by score {info['ranking']}")
    if info["doubts"]:
        print("NOT RELIABLE: " + " ".join(info["doubts"]))
    for warning in info["warnings"]:
        print(f"WARNING: {warning}")
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
    """Print the magnitudes that the published weight aligns, and the ones that this recipe uses."""
    states, sizes, lengths = (vector.info["magnitudes"][name] for name in ("states", "direction", "l2"))
    recipe = vector.info["recipe"]
    print(
        f"layer {layer}: mean |h| {states['plain'][layer]:.4g} plain, {states['instructed'][layer]:.4g} instructed; "
        f"mean |v| {sizes['queries'][layer]:.4g} over queries, {sizes['mean'][layer]:.4g} of their mean; L2 norms "
        f"{lengths['plain'][layer]:.4g} plain, {lengths['direction'][layer]:.4g} of v; published weight "
        f"{float(vector.weight[layer]) / (vector.published or 1.0):.4g} ({recipe['states']} states over {recipe['size']})"
    )


def _ratio(shares: dict[str, Any]) -> str:
    ratio = shares["vision_ratio"]
    return "-" if ratio is None else f"{ratio:.3f}"
