"""The alarm's threshold, chosen from answers of a journal that were judged, perhaps days later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from probes.alarm.evaluate import FALSE_ALARMS, Judged, halves, measure, scores
from probes.answering.versions import in_words, versions
from probes.calibration.measure import calibration_of
from probes.calibration.run import check_place
from probes.harness.benchmark import Findings
from probes.harness.session import Session
from probes.reporting.report import Report
from probes.reporting.tables import Measured
from steering.model.alarm import Alarm

Source = Callable[[str | None, str | None], Sequence[Mapping[str, Any]]]
"""Returns the judged answers of a journal (None: that of the settings) since a time, as `server.journal.reading.truths`."""

READING = f"""\
The threshold of the model's alarm was chosen on one half of the answers, drawn at random, so that {FALSE_ALARMS:.0%} of the
right ones exceed it. All figures are measured on the other half, with 95 % intervals. AUROC: how often a wrong answer has
the greater score than a right one; 0.5 is chance. *alike*: among answers under the same interventions."""


def of_rows(rows: Sequence[Mapping[str, Any]], model: str, names: Sequence[str]) -> Judged:
    """Return a model's answers that have at least one of the numbers; raises ValueError if there are none."""
    own = [row for row in rows if row["model"] == model]
    read = [row for row in own if any(row["numbers"].get(name) is not None for name in names)]
    if not read:
        others = ", ".join(f"{count} of {name}" for name, count in Counter(row["model"] for row in rows).items())
        raise ValueError(
            f"the journal has no judged answer of {model} with the alarm's numbers ({', '.join(names)}): {len(own)} are "
            f"judged{f' (of all models: {others})' if others else ''}. Answers are judged by the metadata "
            "'answer_correct', and have the numbers with --journal-readouts alarm."
        )
    values = {
        name: np.array([np.nan if (x := row["numbers"].get(name)) is None else float(x) for row in read])
        for name in names
    }
    wrong = np.array([not row["right"] for row in read])
    return Judged(wrong, np.full(len(read), "journal"), np.array([row["intervention"] for row in read]), values)


def choose(alarm: Alarm, judged: Judged, seed: int = 0) -> tuple[Alarm, dict[str, Any]]:
    """Return the alarm with a threshold chosen on one half of the answers, and its measurement on the other.

    Raises ValueError if a half has too few right or wrong answers.
    """
    deciding, reported = halves(judged, seed)
    right = scores(alarm, deciding)[~deciding.wrong]
    chosen = replace(alarm, threshold=float(np.quantile(right, 1 - FALSE_ALARMS)), answers=len(deciding.wrong))
    measured, rates = measure(chosen, reported)
    return replace(chosen, raised=rates), measured


def nothing(measured: Mapping[str, Any]) -> str | None:
    """Return why the intervals of a measurement say nothing, None if they say that the alarm tells wrong answers."""
    low = measured["auroc"]["auroc_95"][0]
    if low <= 0.5:
        return f"the interval of its AUROC begins at {low:.2f}, and 0.5 is chance"
    caught, false = measured["alarm"]["caught_95"][0], measured["alarm"]["false_alarms_95"][1]
    if caught <= false:
        return f"it may be raised on only {caught:.2f} of the wrong answers, and on as many as {false:.2f} of the right ones"
    return None


def run(
    source: Source, session: Session, journal: str | None, since: str | None, keep: bool, replaced: bool
) -> Findings:
    """Choose the threshold of the model's alarm, and keep it if asked to; raises ValueError if it says nothing."""
    setup = session.setup
    if setup.base_url is not None:
        raise ValueError("--from-journal needs a model in this process, not --base-url")
    rows = source(journal, since)  # before the model is loaded: there may be no journal
    assert session.engine is not None
    engine = session.engine
    before = calibration_of(engine)
    if before.alarm is None:
        raise ValueError(
            f"{session.model} has no alarm, whose threshold could be chosen: run 'helmsight eval alarm --keep' first"
        )
    if keep:
        check_place(engine.mllm.fingerprint, setup.model.calibrations, "alarm", replaced=replaced)
    judged = of_rows(rows, engine.mllm.name, list(before.alarm.numbers))
    alarm, measured = choose(before.alarm, judged, setup.seed)
    why = nothing(measured)
    if keep and why is not None:
        raise ValueError(f"--keep: the threshold {alarm.threshold:.3f} says nothing: {why}. Judge more answers.")
    about = {
        "model": session.model, "data": f"{len(judged.wrong)} judged answers of the journal", "seed": setup.seed,
        "questions": len(judged.wrong), "versions": versions(),
    }  # fmt: skip
    if keep:
        replace(before, alarm=alarm).keep(setup.model.calibrations)
    page = report(about, before.alarm, alarm, measured, why)
    return Findings(page, about, {}, {"alarm": asdict(alarm), "before": before.alarm.threshold, "measured": measured})


def report(
    about: Mapping[str, Any], before: Alarm, alarm: Alarm, measured: Mapping[str, Any], why: str | None
) -> Report:
    """Return the report of a choice."""
    page = Report(f"The threshold of the alarm of {about['model']}")
    page.facts({"Data": about["data"], "Model": about["model"], "Versions": in_words(about["versions"])})
    page.text(READING)
    rows: list[list[object]] = [["threshold", alarm.threshold], ["threshold before", before.threshold]]
    rows += [
        [name, None if measured[group][key] is None else Measured(measured[group][key], measured[group][f"{key}_95"])]
        for name, group, key in (
            ("AUROC", "auroc", "auroc"),
            ("AUROC, alike", "auroc", "alike"),
            ("raised on right answers", "alarm", "false_alarms"),
            ("raised on wrong answers", "alarm", "caught"),
            ("wrong of those raised", "alarm", "precision"),
        )
    ]
    page.table(["figure", "value"], rows)
    page.text(f"{measured['answers']} answers were measured, {measured['wrong']} of them wrong.")
    if why is not None:
        page.text(f"This threshold says nothing: {why}.")
    return page
