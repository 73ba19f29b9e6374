"""A run of `helmsight vectors build`, which reads pairs and builds, judges, calibrates, reports and saves a vector."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probes.answering.engine import InProcess
from probes.harness.ledger import Remembering
from probes.harness.options import ModelOptions, check_writable
from probes.pairs.build import build, too_few
from probes.pairs.calibrate import calibrate, unmoved
from probes.pairs.file import PromptPair, Rule, different, load
from probes.pairs.learners import Learner, doubtful
from probes.pairs.report import report
from probes.reporting.report import Report
from probes.vector.verdict import disagreement, refuse, refuse_to_replace
from steering import NAME, SteeringVector

_log = logging.getLogger(__name__)
MAX_SIDE = 40


@dataclass(frozen=True)
class PairsOptions:
    """The options of a build.

    pairs: the file of pairs, or of a condition's examples. sides: the names of the sides that plus and minus lead to.
    learner: the method that makes a direction of states. score: the rule for an answer's side; None without
    calibration. calibrated: the most pairs with a question that are held back for it. folder: for the report, and for what
    an interrupted run continues from. Raises ValueError for names that a vector cannot have, FileExistsError for a file that
    must not be overwritten.
    """

    model: ModelOptions
    pairs: Path
    name: str
    sides: tuple[str, str]
    layers: tuple[int, ...] | None
    score: Rule | None
    calibrated: int
    strengths: tuple[float, ...]
    out: Path
    folder: Path
    learner: Learner = "mean"
    seed: int = 0
    force: bool = False
    replace: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError(f"--name {self.name!r} must match {NAME.pattern}")
        if any(not 0 < len(side.strip()) <= MAX_SIDE or not side.isprintable() for side in self.sides):
            raise ValueError(f"--sides: each must have from 1 to {MAX_SIDE} characters, on one line")
        if self.sides[0] == self.sides[1]:
            raise ValueError(f"--sides: both are called {self.sides[0]!r}")
        if self.out.is_dir():
            raise ValueError(f"--out {self.out} is a folder; name a file")
        refuse_to_replace(self.out, self.replace)

    def refuse(self, doubts: Sequence[str]) -> None:
        """Raise ValueError if there are doubts about the vector, unless `force`."""
        if not self.force:
            refuse(self.out, doubts)

    def save(self, vector: SteeringVector, doubts: Sequence[str], page: Report, data: Mapping[str, Any]) -> None:
        """Write the report, and the vector unless there are doubts about it; raise as both refusals do."""
        page.write(self.folder, data)
        print(f"report: {self.folder / 'report.html'}")
        self.refuse(doubts)
        refuse_to_replace(self.out, self.replace)  # keeps a file that another program wrote meanwhile
        self.out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        vector.save(self.out)


def run(options: PairsOptions) -> None:
    """Build, judge, calibrate, report and save a vector.

    Raises ValueError if there are doubts about the vector, unless `force`; for too few pairs before the model is loaded.
    """
    for folder in (options.out.parent, options.folder):
        check_writable(folder)
    read = load(options.pairs)
    pairs = different(read)
    if len(pairs) < len(read):
        _log.warning("%d lines of %s repeat other lines and are left out.", len(read) - len(pairs), options.pairs)
    used, tested = _split(options, pairs)
    if options.learner == "actadd":
        _check_single(options, used)
    doubts = [] if options.learner == "actadd" else too_few(used, held_back=len(tested))
    options.refuse(doubts)
    engine = options.model.engine(options.quiet)
    vector = build(
        engine, used, name=options.name, sides=options.sides, layers=options.layers,
        learner=options.learner, seed=options.seed, state=options.folder / "states.safetensors", quiet=options.quiet,
    )  # fmt: skip
    doubts += disagreement(vector) + doubtful(vector)
    if tested and options.score and (options.force or not doubts):
        tests = [pair.test for pair in tested if pair.test is not None]
        answerer = Remembering(InProcess(engine), options.folder / "answers.jsonl")
        vector = calibrate(
            engine.mllm, answerer, vector, tests, rule=options.score, strengths=options.strengths, layers=options.layers,
            quiet=options.quiet,
        )  # fmt: skip
        doubts += [doubt for doubt in disagreement(vector) if doubt not in doubts] + unmoved(vector, options.sides)
    about = {name: value for name, value in vector.info.items() if name != "reliable"} | {"doubts": doubts}
    # Agreement of pairs is not enough to rely on: pairs agree wherever their words differ alike.
    if doubts or "calibration" in about:
        about["reliable"] = not doubts
    vector = replace(vector, info=about)
    page, data = report(vector, engine.mllm.name, f"{len(pairs)} different pairs of {options.pairs.name}")
    options.save(vector, doubts, page, data)
    _print(vector, options.out)


def _check_single(options: PairsOptions, pairs: Sequence[PromptPair]) -> None:
    """Raise ValueError unless there is what ActAdd needs: one pair, and a layer, which nothing else chooses."""
    if len(pairs) != 1:
        raise ValueError(
            f"--learner actadd makes a vector of a single pair, but {options.pairs} has {len(pairs)}; the mean over pairs "
            "is --learner mean"
        )
    if options.layers is None or len(options.layers) != 1:
        raise ValueError("--learner actadd needs --layers with one layer: a single pair cannot choose it")


def _split(options: PairsOptions, pairs: Sequence[PromptPair]) -> tuple[list[PromptPair], list[PromptPair]]:
    """Return the pairs that build the vector, and those that are held back for the calibration, a third at most."""
    able = [pair for pair in pairs if pair.test is not None]
    if options.score is None:
        if able:
            _log.warning("The questions of %s are not used: --score calibrates the strength with them.", options.pairs)
        return list(pairs), []
    if not able:
        raise ValueError(f"--score needs lines with 'question' and 'expect', but {options.pairs} has none")
    count = min(options.calibrated, len(able), max(1, len(pairs) // 3))
    reserved = {pair.line for pair in random.Random(options.seed).sample(able, count)}
    return [pair for pair in pairs if pair.line not in reserved], [pair for pair in pairs if pair.line in reserved]


def _print(vector: SteeringVector, path: Path) -> None:
    info, layer = vector.info, vector.layers[0]
    plus, minus = info["sides"]
    print(f"{path}: {vector.name}, + is toward {plus}, - toward {minus}; {info['samples']} pairs")
    if info["doubts"]:
        print("NOT RELIABLE: " + " ".join(info["doubts"]))
    print(f"layer {layer}, the pairs agree by {info['agreement'][layer]:.3f} of 1, layers by score {info['ranking']}")
    if "learner" in info and (held_out := info["learner"].get("held_out")) and held_out["auroc"] is not None:
        print(
            "held-out pairs: AUROC {:.3f} ({:.3f} to {:.3f})".format(*held_out["auroc"])
            + f" of {held_out['pairs']} pairs"
        )
    if (calibration := info.get("calibration")) is None and info.get("learner", {}).get("name") == "iti":
        print("strength 1.0 = one sigma (the paper's alpha), NOT calibrated: its effect on answers was not measured")
        return
    if calibration is None:
        print(
            "strength 1.0 = the published weight, NOT calibrated: its effect on answers was not measured, and pairs that "
            "differ in the same words always agree (--score measures the effect)"
        )
        return
    plain, up, down = calibration["baseline"]["plain"], calibration["chosen"]["toward"], calibration["chosen"]["away"]
    print(
        f"strength 1.0 = {calibration['factor']:g} of the published weight, range "
        + "{:g} to {:g}".format(*calibration["range"])
        + f"; {plus} answers {plain['toward']:.3f} plain, {up['toward']:.3f} at +1, {down['toward']:.3f} at -1; "
        f"{minus} answers {plain['away']:.3f}, {up['away']:.3f}, {down['away']:.3f}"
    )
