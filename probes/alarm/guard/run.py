"""A run of the benchmark: questions, the intervention, and the comparison of the three policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from probes.alarm.guard.evaluate import ask, evaluate
from probes.alarm.guard.report import report
from probes.alarm.run import AlarmOptions
from probes.alarm.samples import Checked
from probes.harness.benchmark import Findings
from probes.harness.comparison import BASELINE, Way
from probes.harness.conditions import Wanted
from probes.harness.session import Session
from steering import NumberCondition, conditioned


@dataclass(frozen=True)
class GuardOptions:
    """The benchmark's own options: the guard's conditions and intervention, and the questions."""

    conditions: Sequence[NumberCondition]
    every: bool
    then: Wanted
    questions: AlarmOptions

    @classmethod
    def of(
        cls,
        when: Sequence[str],
        match: str,
        then: str,
        vector: str,
        folders: Callable[[], Sequence[Path]],
        data: str | None,
        noises: tuple[float, ...],
        demo: Callable[[int, int, Sequence[float]], Sequence[Checked]] | None,
    ) -> GuardOptions:
        """Return the options of a command line; raises ValueError for conditions and interventions that do not exist."""
        if match not in ("any", "all"):
            raise ValueError(f"--match must be any or all; got {match[:64]!r}")
        conditions = [_condition(text) for text in when]
        patterns, more = ((), (then,)) if "=" in then else ((then,), ())
        selection = Wanted(patterns, more, folders, vector, flags=("--then", "--then"))
        return cls(conditions, match == "all", selection, AlarmOptions(data, noises, demo))

    def way(self, session: Session) -> tuple[str, Way]:
        """Return the name of the intervention, and what it does."""
        (condition,) = ((name, way) for name, way in self.then.conditions(session).items() if name != BASELINE)
        return condition


def _condition(text: str) -> NumberCondition:
    try:
        return NumberCondition.written(text)
    except KeyError:
        raise ValueError(
            f"--when: {text[:64]!r} is no number of a readout; there are {', '.join(conditioned())}"
        ) from None
    except ValueError as error:
        raise ValueError(f"--when: {text[:64]!r} {error}") from None


def run(options: GuardOptions, session: Session) -> Findings:
    """Ask every question plainly and with the intervention, and compare the policies."""
    if session.endpoint is not None and not session.endpoint.is_helmsight:
        raise ValueError(f"{session.model} is not a Helmsight server: no other server reports readouts.")
    setup = session.setup
    skipped: list[str] = []
    samples = options.questions.draw(setup, skipped)
    name, way = options.way(session)
    tries = ask(session.answerer, samples, options.conditions, way, options.every, setup.quiet)
    results = evaluate(tries, setup.seed)
    about = {
        "model": session.model, "data": options.questions.origin(len(samples), setup.seed), "questions": len(samples),
        "left_out": len(skipped), "when": [condition.text for condition in options.conditions],
        "match": "all" if options.every else "any", "then": name, "seed": setup.seed, "versions": session.versions,
    }  # fmt: skip
    return Findings(report(about, results), about, {}, results)
