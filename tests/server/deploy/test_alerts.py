"""Whom Prometheus' alerts call, and for what."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "deploy" / "monitoring" / "alerts.yml"


CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def evaluate(folder: Path, series: Mapping[str, str], interval: str, **test: Any) -> str:
    """Return what promtool finds wrong with a test's expectations of the rules; nothing if they hold.

    series: by name and labels, values in promtool's notation, one an interval.
    """
    fed = [{"series": name, "values": values} for name, values in series.items()]
    file = folder / "case.yml"
    cases = {"rule_files": [str(ALERTS)], "tests": [{"interval": interval, "input_series": fed, **test}]}
    file.write_text(yaml.safe_dump({**cases, "evaluation_interval": interval}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == ("exp:" in output), output
    return output if done.returncode else ""


def fired(folder: Path, alert: str, series: Mapping[str, str], at: str, interval: str = "1m") -> str:
    """Return the alerts of a name that fire at a time, in promtool's words; nothing if none does."""
    return evaluate(folder, series, interval, alert_rule_test=[{"eval_time": at, "alertname": alert, "exp_alerts": []}])


def valued(
    folder: Path, expression: str, series: Mapping[str, str], at: str, labels: str, value: float, interval: str = "1m"
) -> bool:
    """Return whether an expression has one series, with these labels, and a value at a time, to three digits."""
    samples = [{"labels": labels, "value": value}]
    test = {"expr": f"round({expression}, 0.001)", "eval_time": at, "exp_samples": samples}
    return not evaluate(folder, series, interval, promql_expr_test=[test])


def assert_fires(folder: Path, alert: str, series: str, fires: bool) -> None:
    """Assert that an alert fires, or does not, for a counter that grows by one a second for twenty minutes."""
    assert bool(fired(folder, alert, {series: "0+60x20"}, "20m")) == fires


@pytest.mark.parametrize(
    ("status", "route", "fires"),
    [
        (400, CHAT, False), (429, CHAT, False), (501, CHAT, False), (500, CHAT, True), (503, CHAT, True),
        (503, "/ready", False), (503, "/health", False),
    ],
)  # fmt: skip
def test_nobody_is_called_for_what_a_client_did_wrong_or_a_probe_heard(
    tmp_path: Path, status: int, route: str, fires: bool
) -> None:
    series = f'helmsight_requests_total{{status="{status}", route="{route}", instance="a"}}'
    assert_fires(tmp_path, "HelmsightAnswersFail", series, fires)


@pytest.mark.parametrize(
    ("reason", "fires"),
    [("rate_limit_exceeded", True), ("key_rate_exceeded", False), ("key_concurrency_exceeded", False)],
)
def test_room_lacks_where_the_queue_is_full_and_not_where_a_key_has_had_its_share(
    tmp_path: Path, reason: str, fires: bool
) -> None:
    series = f'helmsight_refusals_total{{status="429", reason="{reason}", instance="a"}}'
    assert_fires(tmp_path, "HelmsightRefusesForLackOfRoom", series, fires)
