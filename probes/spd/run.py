"""A run of the benchmark, which checks the options, draws samples, evaluates and reports."""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from probes.answering.endpoint import Endpoint
from probes.answering.patient import Patient
from probes.harness.benchmark import Findings
from probes.harness.conditions import Wanted
from probes.harness.ledger import Remembering
from probes.harness.session import Session, Setup
from probes.image_pairs.coco import CATEGORIES
from probes.spd.asking import Manner, Presentation, manners
from probes.spd.evaluate import answer, evaluated
from probes.spd.inside import inside
from probes.spd.judging.agreement import agreement
from probes.spd.judging.model import ModelJudge
from probes.spd.judging.rules import Statement, ruled
from probes.spd.loader import Loaded, load
from probes.spd.report import report
from probes.spd.samples import PicturePair
from probes.spd.scoring import Verdict

log = logging.getLogger(__name__)

Drawn = tuple[Sequence[PicturePair], Sequence[str]]
"""Pairs, and the names of the objects that a claim may be about."""


@dataclass(frozen=True)
class JudgeOptions:
    """The options of a judging model: its server, its name there, and the seconds that it has for an answer."""

    url: str
    model: str | None = None
    timeout: float = 90.0

    @property
    def name(self) -> str:
        return " at ".join(filter(None, (self.model, self.url)))

    def load(self, setup: Setup) -> ModelJudge:
        """Return the judge, whose answers are kept beside the others.

        Its key is the environment's JUDGE_API_KEY, or OPENAI_API_KEY. Raises ValueError if there is no such server.
        """
        key = os.environ.get("JUDGE_API_KEY")
        patient = Patient(Endpoint(self.url, model=self.model, api_key=key, timeout=self.timeout))
        return ModelJudge(Remembering(patient, setup.out / "judge.jsonl"), quiet=setup.quiet)


@dataclass(frozen=True)
class SpdOptions:
    """The benchmark's own options.

    They are the files, or `demo(single, several, seed, noise)`, which draws pairs; the number of pairs with `several`
    differences, None for as many as with one; and a judging model, None for the rules.
    """

    wanted: Wanted
    data: str | None
    images: str | None
    demo: Callable[[int, int, int, float], Drawn] | None
    several: int | None
    noise: float
    form: Presentation
    judge: JudgeOptions | None = None

    def __post_init__(self) -> None:
        if self.data is None and self.demo is None:
            raise ValueError("--data is needed: the demo world, which draws pairs, is not installed")
        if self.images is not None and self.data is None:
            raise ValueError("--images needs --data, the rows of the images")

    def draw(self, setup: Setup) -> tuple[Loaded, Sequence[str]]:
        """Return the pairs, those of files shuffled by the seed, and the names of the objects that can change."""
        several = setup.limit if self.several is None else self.several
        if self.data is None:
            assert self.demo is not None
            pairs, names = self.demo(setup.limit, several, setup.seed, self.noise)
            return Loaded(pairs, {}), names
        loaded = load(self.data, self.images)
        pairs = list(loaded.pairs)
        random.Random(setup.seed).shuffle(pairs)
        alone = [pair for pair in pairs if pair.difficulty is not None][: setup.limit]
        multiple = [pair for pair in pairs if pair.difficulty is None][:several]
        return Loaded([*alone, *multiple], loaded.left_out), CATEGORIES


def run(options: SpdOptions, session: Session) -> Findings:
    """Ask about every pair under every condition."""
    setup = session.setup
    loaded, categories = options.draw(setup)
    manners_asked = _possible(manners(options.wanted.conditions(session)), session)
    form = replace(options.form, categories=tuple(categories))

    model = None if options.judge is None else options.judge.load(setup)

    def rules(statements: Sequence[Statement]) -> Sequence[Verdict]:
        return [ruled(statement, categories) for statement in statements]

    answered = answer(session.answerer, manners_asked, loaded.pairs, form, model or rules, setup.quiet)
    scores = evaluated(answered)
    about = _about(options, session, loaded)
    counts = {} if model is None else dict(model.counts)
    more: dict[str, Any] = {"agreement": agreement(model)}
    if session.engine is not None:
        plain = {name: answers for name, answers in answered["single"].items() if not manners_asked[name].way}
        more["inside"] = inside(session.engine, plain)
    if model is not None and options.judge is not None:
        cases = {name: count - counts[name] for name, count in model.counts.items()}
        about["judge"] = {"model": options.judge.name, **counts, "labelled_cases": cases}
    return Findings(report(about, scores, more), about, scores, more)


def _possible(manners_asked: Mapping[str, Manner], session: Session) -> dict[str, Manner]:
    """Return the conditions that are possible: those that read diagnostics need an answerer with diagnostics."""
    if session.endpoint is None or session.endpoint.is_helmsight:
        return dict(manners_asked)
    for name in (name for name, manner in manners_asked.items() if manner.method.reads):
        log.warning(
            "%s is left out: it needs a readout of where the model looked, which only a Helmsight server has.", name
        )
    return {name: manner for name, manner in manners_asked.items() if not manner.method.reads}


def _about(options: SpdOptions, session: Session, loaded: Loaded) -> dict[str, Any]:
    single = sum(pair.difficulty is not None for pair in loaded.pairs)
    noise = f" with noise of standard deviation {options.noise:g} (of 0 to 255)" if options.noise else ""
    where = options.data or f"held-out scenes of the demo world{noise}"
    reasons = Counter(loaded.left_out.values())
    return {
        "model": session.model,
        "data": f"{single} pairs with one difference and {len(loaded.pairs) - single} with several, of {where}, "
        f"seed {session.setup.seed}",
        "left_out": dict(sorted(reasons.items())),
        "shown": "as one picture" if options.form.merged else "as two pictures",
        "single": single, "several": len(loaded.pairs) - single, "noise": options.noise, "seed": session.setup.seed,
        "versions": session.versions,
    }  # fmt: skip
