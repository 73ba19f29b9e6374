"""The report of a condition vector: its layer, measure and threshold, and what it is worth on other examples."""

from __future__ import annotations

from typing import Any

from probes.answering.versions import in_words
from probes.reporting.report import Report
from probes.reporting.tables import Measured
from steering import SteeringVector

MEAN = 'v = the mean of "when" less the mean of "not"'
PROBE = 'v = the weights of a logistic regression of "when" against "not", and the measure is its probability'
READING = """\
{formula}, of the prompts' last states, made of half of the examples. A quarter chose layer, measure and threshold, and the
last quarter is what the table reports. The condition holds where the measure of a prompt's state along v is above the
threshold. AUROC: how often an example of "when" has a greater measure than one of "not"; 0.5 is chance. Intervals are of
95 %."""


def report(vector: SteeringVector, model: str, data_from: str) -> tuple[Report, dict[str, Any]]:
    """Return the report, and the same as data; `data_from` is the origin of the examples in words."""
    info, gate = vector.info, vector.info["gate"]
    page = Report(f"Condition {vector.name} of {model}")
    page.facts({"Data": data_from, "Model": model, "Versions": in_words(info["versions"])})
    formula = PROBE if "bias" in gate else MEAN
    page.text(READING.format(formula=formula))
    page.text("\n".join(f"- {doubt}" for doubt in info["doubts"]) or "The condition tells other examples apart.")
    page.table(
        ["layer", "measure", "threshold", "examples of the direction"],
        [[gate["layer"], gate["measure"], gate["threshold"], info["samples"]]],
    )
    page.heading("On other examples")
    whens, others = gate["examples"]
    auroc = gate["auroc"]
    page.table(
        ["what", "value", "examples"],
        [
            ["AUROC", None if auroc is None else Measured(auroc[0], auroc[1:]), whens + others],
            ['"when": the gate opens', Measured(gate["open_when"][0], gate["open_when"][1:]), whens],
            ['"not": the gate opens', Measured(gate["open_not"][0], gate["open_not"][1:]), others],
        ],
    )
    data = {
        "name": vector.name, "kind": vector.kind, "model": model, "data": data_from, "fingerprint": vector.fingerprint,
        "doubts": info["doubts"], "info": info,
    }  # fmt: skip
    return page, data
