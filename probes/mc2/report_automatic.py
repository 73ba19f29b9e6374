"""The report section of `helmsight eval mc2` on automatic steering."""

from __future__ import annotations

from collections.abc import Mapping

from probes.mc2.report_conditions import Numbers
from probes.reporting.report import Report
from probes.reporting.tables import Measured


def automatic(page: Report, results: Numbers) -> None:
    """Add Table 12, with the gap that each criterion closes."""
    page.heading("Choosing the direction automatically (Table 12)")
    page.text(
        "One modality of each sample is degraded, and the other one's answer is right. Gap closed: the share of the "
        "difference between the plain model and one steered to the known right side (prior) that a criterion achieves, "
        "(auto - plain) / (prior - plain), with a 95 % bootstrap interval over samples. It is below 0 where the criterion "
        "makes answers worse, and missing where prior is not better than plain."
    )
    for criterion in results["criteria"]:
        page.text(
            _worth(criterion, {row["degraded"]: row for row in _rows(results, None) if row["criterion"] == criterion})
        )
    page.text(
        "Drop measures which modality the plain answer relies on, not which side is right. Surprise measures the text "
        "alone: it abstains where the text is not surprising, unless the request states that one modality is degraded. "
        "The rows on unfamiliar text have a sound text in a wording that the model does not know."
    )
    for severity in (None, *results["severities"]):
        page.heading("All severities" if severity is None else f"Severity {severity:g}", 3)
        _gaps(page, _rows(results, severity))
    page.heading("What is left of each modality", 3)
    page.text(
        "Right answers where one modality is shown alone, each by its own answer. The sound modality must be readable; "
        "for the degraded one, chance is .5 with two options."
    )
    page.table(
        ["degraded", "severity", "sound modality alone", "degraded modality alone"],
        [
            (
                "text" if cell["side"] == "vision" else "image, unfamiliar text" if cell["reworded"] else "image",
                f"{cell['severity']:g}", cell["reliable_alone"], cell["degraded_alone"],
            )
            for cell in results["cells"]
        ],
    )  # fmt: skip


def _rows(results: Numbers, severity: float | None) -> list[Numbers]:
    return [row for row in results["rows"] if row["severity"] == severity]


def _gaps(page: Report, rows: list[Numbers]) -> None:
    page.table(
        ["degraded", "criterion", "plain", "prior", "auto", "gap closed"],
        [
            (row["degraded"], row["criterion"], row["plain"], row["prior"], row["auto"],
             Measured(row["gap_closed"], row["gap_closed_95"]))
            for row in rows
        ],
    )  # fmt: skip
    page.text("What the criterion decided, as shares of the questions and of those that it decided:")
    page.table(
        ["degraded", "criterion", "decided", "toward vision", "right if decided", "points to the plain answer's side",
         "tasks by majority"],
        [
            (row["degraded"], row["criterion"], row["decided"], row["toward_vision"], row["right_if_decided"],
             row["follows"], row["tasks"])
            for row in rows
        ],
    )  # fmt: skip


def _worth(criterion: str, pooled: Mapping[str, Numbers]) -> str:
    """Return a paragraph on a criterion, over all severities, by the degraded modality."""
    either, unfamiliar = pooled["either"], pooled["image, unfamiliar text"]
    return (
        f"{criterion}: {_describe_gap(either)}; with a degraded image it {_describe_gap(pooled['image'])}, with a degraded "
        f"text it {_describe_gap(pooled['text'])}. Where sound texts are in an unfamiliar wording it "
        f"{_describe_gap(pooled['either, unfamiliar text'])}, with a degraded image {_describe_gap(unfamiliar)}. It decides "
        f"{100 * either['decided']:.0f} % of the questions, {_percent(either['right_if_decided'])} of those rightly, and "
        f"points to the plain answer's side in {_percent(either['follows'])}. It steers away from "
        f"{100 * pooled['image']['toward_vision']:.0f} % of the sound texts, "
        f"{100 * unfamiliar['toward_vision']:.0f} % of those in an unfamiliar wording and "
        f"{100 * pooled['text']['toward_vision']:.0f} % of the degraded ones."
    )


def _describe_gap(row: Numbers) -> str:
    if row["gap_closed"] is None:
        return "finds no gap to close"
    closed, (low, high) = row["gap_closed"], row["gap_closed_95"]
    least, most = f"{100 * abs(low):.0f}", f"{100 * abs(high):.0f}"
    between = f"{least} % wider to {most} % closed"
    if low >= 0:
        between = f"{least} to {most} % closed"
    elif high <= 0:
        between = f"{most} to {least} % wider"
    share = f"{100 * abs(closed):.0f} %"
    if share == "0 %":
        return f"leaves the gap as it is ({between})"
    return f"closes {share} of the gap ({between})" if closed > 0 else f"widens the gap by {share} ({between})"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.0f} %"
