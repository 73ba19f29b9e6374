"""The report of `helmsight eval mm-sap`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.answering.versions import in_words
from probes.harness.comparison import BASELINE
from probes.harness.comparison_tables import READING, table
from probes.harness.missing import left_out
from probes.mmsap.evaluate import TOTAL
from probes.mmsap.samples import PARTS, TITLES
from probes.reporting import plots
from probes.reporting.report import Report
from probes.reporting.tables import Measured

SCORES = """\
Shares of the questions; the paper's scores are these times 100. *kk*: answered rightly. *ku*: rightly refused. That is any
refusal in BeyondVisQA, none in BasicVisQA, and in KnowVisQA a refusal of a question that the model answers wrongly when
asked again without the refusal among the options. *sa*: their sum. Every question is asked in {runs} runs with its options
in another order; mean ± standard deviation of the runs' scores."""

_SCORES = (
    ("basic", "kk"),
    ("know", "kk"),
    ("know", "ku"),
    ("beyond", "ku"),
    (TOTAL, "kk"),
    (TOTAL, "ku"),
    (TOTAL, "sa"),
)
_ANSWERS = tuple((part, name) for part in PARTS for name in ("answer_rate", "answer_accuracy"))[:-1]
_REFUSALS = (
    ("know", "refusals"), ("know", "unknown_knowns"), ("know", "knowledge"), ("basic", "refusals"), (TOTAL, "unread"),
)  # fmt: skip


def report(about: Mapping[str, Any], results: Mapping[str, Any], runs: Mapping[str, Any]) -> Report:
    """Return the report of a run; `about` describes it, `results` and `runs` are the results of `evaluate`."""
    page = Report(f"MM-SAP on {about['model']}")
    page.facts(
        {"Data": about["data"], **left_out(about), "Model": about["model"], "Versions": in_words(about["versions"])}
    )
    page.text(SCORES.format(runs=about["runs"]))
    page.heading("Scores (the paper's tables 1 and 3)")
    _table(page, runs, _SCORES)
    totals = {name: scores[TOTAL]["all"] for name, scores in results.items()}
    page.plot(
        "scores",
        plots.isolines(
            {name: (total["kk"]["value"], total["ku"]["value"]) for name, total in totals.items()},
            xlabel="score_kk (share of all questions)",
            ylabel="score_ku (share of all questions)",
            label="score_sa",
        ),
        "What is known and answered, and what is unknown and refused, by condition",
    )
    page.heading("Compared with the plain answers")
    page.text(READING)
    page.text("All runs together; the intervals are over samples of such questions, not over runs.")
    table(page, results, TOTAL, ("kk", "ku", "sa"))
    page.heading("Answers and refusals (the paper's tables 2 and 4)")
    page.text(
        "*rate*: share not refused. *accuracy*: share of right answers among those. An answer that names no option counts "
        "as answered and wrong. BeyondVisQA has no right answers."
    )
    _table(page, runs, _ANSWERS)
    page.text(
        "*refusals*: number per run. *unknown knowns*: the share of KnowVisQA's refused questions that is answered "
        "rightly without the refusal among the options. *knowledge*: that share of all its questions. *unread*: answers "
        "that neither choose an option nor refuse in words."
    )
    _table(page, runs, _REFUSALS)
    page.heading("By subtask (the paper's figure 3)")
    page.text("score_sa, the share of answers that are right or rightly refused.")
    _subtasks(page, results)
    return page


def _table(page: Report, runs: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> None:
    """Add a table with a row per condition and a column per metric of a part, without parts that were not asked."""
    measured = [(part, name) for part, name in columns if part in runs[BASELINE]]
    heads = [f"{TITLES.get(part, 'all')} {name.replace('answer_', '').replace('_', ' ')}" for part, name in measured]  # type: ignore[call-overload]
    rows = [[name, *(_spread(run[part][metric]) for part, metric in measured)] for name, run in runs.items()]
    page.table(["condition", *heads], rows)


def _spread(values: Mapping[str, Any]) -> str | None:
    mean, deviation = values["mean"], values["deviation"]
    if mean is None:
        return None
    return f"{mean:.3f}" + ("" if deviation is None else f"\u00a0±\u00a0{deviation:.3f}")


def _subtasks(page: Report, conditions: Mapping[str, Any]) -> None:
    rows: list[list[object]] = []
    for part in (part_name for part_name in PARTS if part_name in conditions[BASELINE]):
        for subtask, scores in conditions[BASELINE][part].items():
            if subtask != "all":
                values = (scores_by_part[part][subtask]["sa"] for scores_by_part in conditions.values())
                first, *others = [Measured(score["value"], score["value_95"]) for score in values]
                rows.append([TITLES[part], subtask, scores["samples"], first, *(score.value for score in others)])
    page.table(["part", "subtask", "n", *conditions], rows)
