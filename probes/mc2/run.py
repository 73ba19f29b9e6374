"""A run of the benchmark, which checks the options, draws samples, evaluates and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from probes.conflicts.options import PROBE_SEEDS, Data
from probes.conflicts.samples import ConflictSample, Wording
from probes.conflicts.shares import Outcome
from probes.conflicts.words import origin
from probes.harness.benchmark import Findings
from probes.harness.conditions import find
from probes.harness.session import Session
from probes.mc2 import ablate, derived
from probes.mc2 import report as tables
from probes.mc2.automatic import CRITERIA, automatic
from probes.mc2.evaluate import STEERED, Candidate, Evaluation, conditions_of, evaluate
from probes.mc2.lens import lens
from probes.mc2.report_conditions import TITLES
from probes.reporting.tables import Summary
from steering import Criterion, Engine, SteeringVector
from steering.auto.surprise import bound_of

SHOTS = 4
LENS_KINDS = ("plain", "instruct", "steer")
LENS_SAMPLES = 100
"""The most samples that are read layer by layer."""
PROBED, LEAST_PROBED = 250, 25
"""The most and the fewest samples of the ablations that build vectors."""


@dataclass(frozen=True)
class MC2Options:
    """The benchmark's own options.

    Vectors are searched in `folders()`; `auto` are the names of criteria, empty for all and None for none. Raises ValueError
    for options that do not go together.
    """

    data: Data
    conditions: tuple[str, ...]
    wording: Wording
    vector: str
    folders: Callable[[], Sequence[Path]]
    strength: float
    random_directions: int
    ablate: tuple[str, ...]
    lens: bool
    auto: tuple[str, ...] | None
    severities: tuple[float, ...]
    inside: bool
    """True if the model is in this process."""

    def __post_init__(self) -> None:
        wants_vector = self.ablate or self.auto is not None or self.random_directions
        if wants_vector and not self.steers:
            raise ValueError("--ablate, --auto and --random-directions need the condition 'steer'")
        if not self.inside and (needing := {"samples", "tasks", "latency"} & set(self.ablate)):
            raise ValueError(f"--ablate {' '.join(sorted(needing))} needs the model in this process, not --base-url")
        if not self.inside and self.lens:
            raise ValueError("--lens needs the model in this process, not --base-url")
        if self.lens and not self.read_by_layer:
            raise ValueError(f"--lens needs one of the conditions {', '.join(LENS_KINDS)}")
        for severity in self.severities:
            if not 0 <= severity <= 1:
                raise ValueError(f"--severity must be from 0 to 1, not {severity:g}")

    @property
    def read_by_layer(self) -> tuple[str, ...]:
        """The conditions that --lens reads."""
        return tuple(kind for kind in self.conditions if kind in LENS_KINDS)

    @property
    def steers(self) -> bool:
        """True if a condition needs a vector."""
        return bool(set(STEERED) & set(self.conditions))


def run(options: MC2Options, session: Session) -> Findings:
    """Evaluate the conditions, and the requested ablations."""
    setup = session.setup
    vector = _vector(options, session)
    left_out: list[str] = []
    made_from = () if vector is None else vector.info.get("made_from", ())
    samples, shots, probe = _samples(options, session, made_from, left_out)
    criteria = _criteria(options, session.engine)
    steering = None if vector is None else Candidate(vector, options.strength)
    evaluation = evaluate(
        session.answerer, samples, steering=steering, kinds=options.conditions, shots=shots, wording=options.wording,
        random_directions=options.random_directions, seed=setup.seed, quiet=setup.quiet,
    )  # fmt: skip
    about = _about(options, session, samples, vector)
    about["left_out"] = len(left_out)
    more = _derive(evaluation, samples)
    if session.engine is not None and options.lens:
        conditions_read = conditions_of(options.read_by_layer, steering, (), options.wording)
        margins = lens(session.engine, samples[:LENS_SAMPLES], conditions_read, quiet=setup.quiet)
        more["lens"] = {name: margin.to_json() for name, margin in margins.items()}
    if steering is not None:
        more |= _ablations(options, session, probe, samples, steering)
        if criteria:
            more["auto"] = _automatic(options, session, samples, steering, criteria)
    conditions = evaluation.to_json()
    page = tables.report({"about": about, "conditions": conditions, **more})
    title = f"{session.model}: {len(samples)} samples, seed {setup.seed}"
    return Findings(page, about, conditions, more, summary(evaluation, title))


def _vector(options: MC2Options, session: Session) -> SteeringVector | None:
    """Return the vector to steer with, if anything is steered."""
    if not options.steers:
        return None
    return find(options.vector, session, options.folders())


def _samples(
    options: MC2Options, session: Session, made_from: Sequence[str], left_out: list[str]
) -> tuple[list[ConflictSample], list[ConflictSample], list[ConflictSample]]:
    """Return the samples to ask, the solved examples, and the samples from which the ablations build vectors.

    No sample is in two of these, or among those that the vector was made from; samples of the file that are left out are
    added to `left_out`.
    """
    setup = session.setup
    examples = SHOTS if "shots" in options.conditions else 0
    drawn = options.data.draw(setup.limit + examples, setup.seed, without=made_from, left_out=left_out)
    count = max(0, len(drawn) - examples)
    if not count:
        raise ValueError(f"{len(drawn)} samples are too few.")
    probe: list[ConflictSample] = []
    if {"samples", "tasks"} & set(options.ablate):
        probe = options.data.draw(PROBED, PROBE_SEEDS + setup.seed, without=[sample.id for sample in drawn])
        if len(probe) < LEAST_PROBED:
            raise ValueError(
                f"--ablate samples and tasks build vectors from at least {LEAST_PROBED} samples besides those that are "
                f"asked; there are {len(probe)}."
            )
    return drawn[:count], drawn[count:], probe


def _derive(evaluation: Evaluation, samples: Sequence[ConflictSample]) -> dict[str, Any]:
    """Return the results that follow from the samples and the answers."""
    results: dict[str, Any] = {"words": derived.words(samples), "attention": derived.attention(evaluation)}
    if plain := evaluation.conditions.get("plain"):
        outcomes: list[Outcome] = [
            "vision" if vision else "text" if text else "others"
            for vision, text in zip(plain.followed["vision"], plain.followed["text"], strict=True)
        ]
        if (sizes := derived.by_size(outcomes, [sample.task for sample in samples])) is not None:
            results["sizes"] = sizes.to_json()
    return results


def _about(
    options: MC2Options, session: Session, samples: Sequence[ConflictSample], vector: SteeringVector | None
) -> dict[str, Any]:
    about: dict[str, Any] = {
        "model": session.model, "data": origin(options.data, samples, session.setup.seed), "samples": len(samples),
        "seed": session.setup.seed, "wording": options.wording, "versions": session.versions,
    }  # fmt: skip
    if vector is not None:
        published = None if vector.published is None else round(options.strength * vector.published, 6)
        about |= {
            "vector": vector.name, "strength": options.strength, "published strength": published,
            "layers": list(vector.layers), "model layers": len(vector.direction),
        }  # fmt: skip
    return about


def _ablations(
    options: MC2Options,
    session: Session,
    probe: Sequence[ConflictSample],
    samples: Sequence[ConflictSample],
    steering: Candidate,
) -> dict[str, Any]:
    """Run the requested ablations."""
    engine, answerer = session.engine, session.answerer
    results: dict[str, Any] = {}
    seed, quiet = session.setup.seed, session.setup.quiet
    if engine is not None and "samples" in options.ablate:
        sizes = ablate.by_samples(engine, answerer, probe, samples, steering, seed=seed, quiet=quiet)
        results["samples"] = {str(size): row.to_json() for size, row in sizes.items()}
    if engine is not None and "tasks" in options.ablate:
        tasks = ablate.by_tasks(engine, answerer, probe, samples, steering, seed=seed, quiet=quiet)
        results["tasks"] = {task: row.to_json() for task, row in tasks.items()}
    if "strength" in options.ablate:
        strengths = ablate.by_strength(answerer, samples, steering, quiet=quiet)
        published = steering.vector.published
        results["strength"] = {
            "unit": "own" if published is None else "published", "published": published,
            "knee": ablate.knee(strengths).to_json(),
            "rows": {f"{s:g}": row.to_json() for s, row in strengths.items()},
        }  # fmt: skip
    if engine is not None and "latency" in options.ablate:
        seconds = ablate.latency(engine, samples[:100], steering, quiet=quiet)
        results["latency"] = {name: row.to_json() for name, row in seconds.items()}
    return results


def _criteria(options: MC2Options, engine: Engine | None) -> dict[str, Criterion]:
    """Return the criteria of --auto by their names in the report.

    The bound of the model in this process is stated, so that kept answers are not taken for those of another bound; a server
    has its own.
    """
    if options.auto is None:
        return {}
    chosen = {
        name: criterion for name, criterion in CRITERIA.items() if not options.auto or criterion.name in options.auto
    }
    if engine is None:
        return chosen
    return {
        name: replace(criterion, bound=bound_of(engine.mllm, None)) if criterion.name == "surprise" else criterion
        for name, criterion in chosen.items()
    }


def _automatic(
    options: MC2Options,
    session: Session,
    samples: Sequence[ConflictSample],
    steering: Candidate,
    criteria: dict[str, Criterion],
) -> dict[str, Any]:
    """Evaluate automatic steering."""
    report = automatic(
        session.answerer, samples, steering, criteria=criteria, severities=options.severities,
        seed=session.setup.seed, quiet=session.setup.quiet,
    )  # fmt: skip
    return report.to_json() | {"bounds": {name: criterion.bound for name, criterion in criteria.items()}}


def summary(evaluation: Evaluation, title: str) -> Summary:
    """Return the conditions as a table for the terminal."""
    columns = ("condition", "S_v", "S_t", "S_o", "Vision Ratio", "image only", "context only", "attention")
    rows = []
    for name, preference in evaluation.conditions.items():
        shares = preference.shares
        measured = (shares.s_vision, shares.s_text, shares.s_others, shares.vision_ratio)
        rows.append(
            (TITLES[name], *measured, preference.image_only, preference.context_only, preference.attention_ratio)
        )
    spreads = evaluation.random_spread().values() if evaluation.random else ()
    controls = [
        (f"{len(evaluation.random)} random, {row}", *(value[row] for value in spreads), None, None, None)
        for row in ("min", "mean", "max")
        if spreads
    ]
    return Summary(title, columns, (rows, controls))
