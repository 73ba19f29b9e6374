"""A Prometheus of a simulated day: what it scraped, minute by simulated minute, and whom its alerts call."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.server.deploy.test_alerts import ALERTS, evaluate

STEP = 150
"""Simulated seconds between two scrapes: two lie in the shortest window of an alert, five minutes."""
DAY = 86_400
SCRAPES = DAY // STEP
FAILED = "_"
"""Promtool's sign of a missing sample."""
UNFAITHFUL = "HelmsightAnswersLookUnfaithful"


class Watch:
    """Scrapes of a server's metrics in order; one that fails has no samples, and `up` is 0."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._headers = f"{url}/metrics", {"Authorization": f"Bearer {key}"}
        self._names = set(re.findall(r"\b(?:up|helmsight_\w+)", ALERTS.read_text()))
        self._series: dict[str, dict[int, float]] = defaultdict(dict)
        self.scrapes = 0

    def scrape(self) -> bool:
        """Take the next scrape; return whether the server answered."""
        number, self.scrapes = self.scrapes, self.scrapes + 1
        try:
            response = requests.get(self._url, headers=self._headers, timeout=30)
            text = response.text if response.ok else None
        except requests.RequestException:
            text = None
        self._series[series("up", {"job": "helmsight"})][number] = float(text is not None)
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                if sample.name in self._names:
                    self._series[series(sample.name, sample.labels)][number] = sample.value
        return text is not None

    def values(self) -> dict[str, str]:
        """Return the series in promtool's notation."""
        return {
            name: " ".join(str(known[number]) if number in known else FAILED for number in range(self.scrapes))
            for name, known in self._series.items()
        }

    def firing(self, folder: Path, seconds: list[int], alerts: str, expected: dict[str, int]) -> str:
        """Return what promtool finds if not just the expected alerts, a name with a count, fire at these times."""
        samples = [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in expected.items()]
        query = f'count by (alertname) (ALERTS{{alertstate="firing", {alerts}}})'
        tests: list[dict[str, Any]] = [
            {"expr": query, "eval_time": f"{second}s", "exp_samples": samples} for second in seconds
        ]
        return evaluate(folder, self.values(), f"{STEP}s", promql_expr_test=tests)


def series(name: str, labels: dict[str, str]) -> str:
    pairs = {"instance": "walk", **labels}
    return f"{name}{{{', '.join(f'{key}={chr(34)}{value}{chr(34)}' for key, value in pairs.items())}}}"


def totals(url: str, key: str, name: str) -> dict[str, float]:
    """Return the samples of a metric by their labels, as one text."""
    text = requests.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}, timeout=30).text
    return {
        series(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }
