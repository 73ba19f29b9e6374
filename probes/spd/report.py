"""The report of `helmsight eval spd-faith`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from probes.answering.versions import in_words
from probes.harness.comparison import BASELINE
from probes.harness.comparison_tables import READING, power, table
from probes.image_pairs.faithfulness import ERRORS
from probes.image_pairs.metrics import TYPES
from probes.image_pairs.questions import EXPLAINED_DIFFERENT, EXPLAINED_SAME
from probes.reporting.report import Report
from probes.reporting.tables import Measured
from probes.spd.inside import NUMBERS

_SINGLE = ("contradictions", "yes_same", "right", "unread")
_SEVERAL = ("dqr_exact", "dqr_ratio", "ds_tolerance", "ds_detect", "tf1", "cf1", "cf1_released", "cr", "drf")
DEFINED = 'docs/study.md, "The numbers of SPD-Faith", defines each number and names its equation.'


def report(about: Mapping[str, Any], results: Mapping[str, Any], more: Mapping[str, Any]) -> Report:
    """Return the report of a run.

    `about` describes the run, `results` is the result of `evaluated`; `more` holds the result of `agreement`, and that of
    `inside` if the model is in this process.
    """
    page = Report(f"SPD-Faith on {about['model']}")
    left_out = ", ".join(f"{count} with {reason}" for reason, count in about["left_out"].items())
    page.facts({
        "Data": about["data"],
        "Left out": left_out or None,
        "Model": about["model"],
        "Shown": about["shown"],
        "Judge": _judge(about.get("judge")),
        "Versions": in_words(about["versions"]),
    })  # fmt: skip
    page.text(READING)
    page.text(DEFINED)
    for part, write in (("single", _single), ("several", _several)):
        if part in results[BASELINE]:
            write(page, {name: scores for name, scores in results.items() if part in scores})
    if "inside" in more:
        _inside(page, more["inside"])
    _agreement(page, more["agreement"])
    return page


def _judge(judge: Mapping[str, Any] | None) -> str:
    if judge is None:
        return "rules"
    return (
        f"{judge['model']}, asked {_counts_text(judge)}, and of labelled cases {_counts_text(judge['labelled_cases'])}"
    )


def _counts_text(counts: Mapping[str, int]) -> str:
    return f"{counts['asked']} times, of which {counts['failed']} failed and {counts['unreadable']} could not be read"


def _inside(page: Report, results: Mapping[str, Any]) -> None:
    page.heading("Contradictions inside the model")
    page.text(
        'Answers to "same?" and "different?" about pairs with one difference, without interventions: those that '
        "contradict each "
        "other, and as many that do not. They are read once more as forced answers: the cosine of their mean states, mean "
        "over layers; the difference between the norms of a layer's update, mean over layers (the released code's ICR "
        "divergence); and its faithfulness score, the cosine times 1 - the divergence."
    )
    page.table(
        ("answers", "pairs", *NUMBERS),
        [
            [kind, result["pairs"], *(Measured(result[name]["value"], result[name]["value_95"]) for name in NUMBERS)]
            for kind, result in results.items()
        ],
    )


def _agreement(page: Report, agreed: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    page.heading("Agreement of the judges")
    page.text(
        "Agreement on labelled cases. Some have wordings that the rules cannot read, and count as no claim. n: cases that "
        "both judged."
    )
    page.table(
        ("labels of", "first", "second", "n", "agree", "Cohen's kappa"),
        [
            (label, row["first"], row["second"], row["n"], row["agreed"], Measured(row["kappa"], row["kappa_95"]))
            for label, rows in agreed.items()
            for row in rows
        ],
    )


def _single(page: Report, results: Mapping[str, Any]) -> None:
    page.heading("One difference")
    power(page, results, "single", "contradictions", "pairs of images")
    table(page, results, "single", _SINGLE)
    settings = [name for name in results[BASELINE]["single"] if name != "all"]
    if len(settings) > 1:
        page.heading("By difficulty", 3)
        table(page, results, "single", _SINGLE, settings, differences=False)


def _several(page: Report, results: Mapping[str, Any]) -> None:
    page.heading("Several differences")
    power(page, results, "several", "dqr_exact", "pairs of images")
    if "Zoom-Refine" in results:
        page.text("Zoom-Refine gives the baseline's answer wherever the model names no region.")
    table(page, results, "several", _SEVERAL)
    page.heading("By type and category", 3)
    for part in ("precision", "recall"):
        names = {f"{kind}, {part}": f"{kind}_{part}" for kind in (*TYPES, "category")}
        table(page, results, "several", names, differences=False)
    page.heading("Consistency", 3)
    page.text(f'cr compares the answers to "{EXPLAINED_SAME}" and "{EXPLAINED_DIFFERENT}".')
    consistency = ("cr", "cr_all", "cr_clauses", "cr_pairs", "yes_no_consistency", "contradictions", "yes_same")
    table(page, results, "several", consistency, differences=False)
    page.heading("Faithfulness of what is described", 3)
    page.text(
        "The model is asked for as many differences as it counted itself. Shares of the claims; quantity_error: of pairs."
    )
    faithful = ("drf", "drf_claims", "drf_pairs", *ERRORS, "quantity_error", "counted")
    table(page, results, "several", faithful, differences=False)
    settings = [name for name in results[BASELINE]["several"] if name != "all"]
    if len(settings) > 1:
        page.heading("By number of differences", 3)
        narrow = [metric for metric in _SEVERAL if metric != "cf1_released"]  # ten columns fit
        table(page, results, "several", narrow, settings, differences=False)
