"""Whom Prometheus' alerts call, and for what."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).parents[3] / "deploy" / "monitoring" / "alerts.yml"


CHAT = "/v1/chat/completions"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
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
    """Ten minutes of requests that end so, one a second; promtool fails where the alert that is not expected fires."""
    series = f'helmsight_requests_total{{status="{status}", route="{route}", instance="a"}}'
    none = {"eval_time": "10m", "alertname": "HelmsightAnswersFail", "exp_alerts": []}
    case = {"interval": "1m", "input_series": [{"series": series, "values": "0+60x10"}], "alert_rule_test": [none]}
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fires, said
    assert ("exp:[" in said) == fires, said
