"""Whom Prometheus' alerts call, and for what."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "deploy" / "monitoring" / "alerts.yml"


CHAT = "/v1/chat/completions"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def assert_fires(folder: Path, alert: str, series: str, fires: bool) -> None:
    """Assert that an alert fires, or does not, for a counter that grows by one a second for twenty minutes.

    promtool fails where the alerts that fire are not the expected ones.
    """
    none = {"eval_time": "20m", "alertname": alert, "exp_alerts": []}
    case = {"interval": "1m", "input_series": [{"series": series, "values": "0+60x20"}], "alert_rule_test": [none]}
    file = folder / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fires, said
    assert ("exp:[" in said) == fires, said


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
