"""The report of `helmsight eval guard`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probes.answering.versions import in_words
from probes.harness.missing import left_out
from probes.reporting.report import Report
from probes.reporting.tables import Measured

READING = """\
Every question is answered plainly and with the intervention. The guard keeps the plain answer unless it meets a condition
and the other one meets none. Shares have Wilson's 95 % intervals; differences are paired by question, with bootstrap
intervals."""
SHARES = {
    "caught": "wrong answers that meet a condition",
    "mended": "wrong answers that the guard makes right",
    "raised": "right answers that meet a condition",
    "broken": "right answers that the guard makes wrong",
    "given_again": "answers that are given again",
    "kept": "answers that are replaced",
}
POLICIES = {"never": "never the intervention", "always": "always the intervention", "guarded": "the guard"}


def report(about: Mapping[str, Any], results: Mapping[str, Any]) -> Report:
    """Return the report of a run; `results` are those of `evaluate`."""
    page = Report(f"A guard on {about['model']}")
    joined = " and " if about["match"] == "all" else " or "
    guard = {"When": joined.join(about["when"]), "Then": about["then"]}
    page.facts({"Data": about["data"], **left_out(about), **guard, "Versions": in_words(about["versions"])})
    page.text(READING)
    page.heading("Policies")
    page.text(f"{results['answers']} questions, {results['wrong']} plain answers wrong.")
    cost = {"never": 1.0, "always": 1.0, "guarded": 1.0 + (results["given_again"]["share"] or 0.0)}
    page.table(
        ["policy", "accuracy", "the guard's gain over it", "answers a question"],
        [
            [label, _share(results["accuracy"][name]), _gain(results["gain"].get(name)), round(cost[name], 3)]
            for name, label in POLICIES.items()
        ],
    )
    page.heading("The guard")
    page.table(
        ["share of", "share", "of"],
        [[label, _share(results[name]), results[name]["n"]] for name, label in SHARES.items()],
    )
    return page


def _share(result: Mapping[str, Any]) -> Measured:
    return Measured(result["share"], result["share_95"])


def _gain(gain: Mapping[str, Any] | None) -> Measured | None:
    return None if gain is None else Measured(gain["difference"], gain["difference_95"], signed=True)
