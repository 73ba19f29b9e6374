"""Compose's server, PostgreSQL and Prometheus, nginx before them, for real: what dashboard and alerts ask for is there."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from server.settings import Settings
from tests.server.access.conftest import KeyFile
from tests.server.api.test_streams import post_and_hold
from tests.server.conftest import data_uri, user
from tests.server.deploy.conftest import NAME, Front
from tests.server.deploy.stack import SERVICES, Prometheus, Root, composed, lacking
from tests.server.deploy.test_files import DEPLOY
from tests.server.journal.journals import running_postgres
from tests.server.process.servers import PATIENCE
from tests.server.process.test_gunicorn import ENDLESS
from tests.waiting import wait_for

LACKING = lacking("prometheus", "nginx")
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")]

PANELS = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "monitoring" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
DAILY = '{instance=~".*",source=~"(live|observe)?"}'
EMPTY = {
    "helmsight_gpu_memory_reserved_bytes": "there is no GPU",
    "helmsight_gpu_memory_allocated_bytes": "there is no GPU",
    "helmsight_gpu_memory_free_bytes": "there is no GPU",
    'helmsight_requests_total{status=~"5..", status!="501", route!~"/health|/ready"}': "nothing has failed",
    "helmsight:drift:ks1d": "there was no week before",
    'count by (alertname, alertstate) (ALERTS{alertname=~"Helmsight.*"})': "nobody is called",
    **{
        f"histogram_quantile(0.5, sum by (le) (increase(helmsight_{name}_bucket{DAILY}[1d] offset 1w)))": (
            "there was no week before"
        )
        for name in ("focus_share", "dose")
    },
}
"""Series that do not exist here, with the reason."""
QUESTION = "Text context: The green object is a heart.\nWhat is the green object?"
CHATS: tuple[dict[str, Any], ...] = (
    {},
    {"stream": True},
    {"steering": {"toward": "vision"}, "diagnostics": True},
    {"sage": True, "diagnostics": {"include": ["focus", "modality", "decay", "flags"]}},
)
CHAT = "/v1/chat/completions"
NAMED = SERVICES["helmsight"]["environment"]["HELMSIGHT_NAMED_KEY_FILE"]
WIDE = 8
ROOM = (Settings().slots + Settings().max_waiting * 7 // 8) // WIDE
"""Answers of a request, and requests of one key that all slots and seven eighths of the queue hold."""


def finite(prometheus: Prometheus, expression: str) -> bool:
    """Return whether an expression has a series whose value is a number."""
    return any(math.isfinite(value) for _, value in prometheus.values(expression))


def test_what_compose_watches_is_there(front: Front, tmp_path: Path) -> None:
    root = Root(tmp_path / "root")
    root.put("/run/secrets/api_key", "a-key-of-compose\n")
    root.put(NAMED, "")
    keys = KeyFile(Path(f"{root.folder}{NAMED}"))
    shop = keys.add("shop", "use", rate="1/hour", expires=datetime(2099, 1, 1, tzinfo=UTC))
    root.put("/run/secrets/metrics_key", keys.add("prometheus", "journal")["Authorization"].partition(" ")[2])
    database = SERVICES["postgres"]["environment"]
    with running_postgres(database["POSTGRES_PASSWORD"]) as postgres:
        postgres.run("postgres", f"CREATE DATABASE {database['POSTGRES_DB']} OWNER {database['POSTGRES_USER']}")
        with composed(root, f"@127.0.0.1:{postgres.port}/") as (server, prometheus):
            url, sent = front(int(server.url.rpartition(":")[2])), Counter[str]()
            ours = {"Authorization": "Bearer a-key-of-compose"}

            def ask(shown: dict[str, str], **fields: Any) -> None:
                body = {"messages": [user(data_uri(), QUESTION)], "max_tokens": 8, **fields}
                answer = requests.post(url + CHAT, json=body, headers={"Host": NAME, **shown}, timeout=PATIENCE)
                sent[str(answer.status_code)] += 1

            def counted() -> dict[str, float]:
                found = prometheus.values(f'sum by (status) (helmsight_requests_total{{route="{CHAT}"}})')
                return {labels["status"]: value for labels, value in found}

            for _ in range(2):  # what begins to be counted has no rate before it is counted again
                for fields in CHATS:
                    ask(ours, **fields)
                for shown in (shop, shop, {}):
                    ask(shown)
                post_and_hold(server.url, True, ours, max_tokens=1800, **ENDLESS).close()
                sent["200"] += 1
                wait_for(lambda: counted() == sent, PATIENCE)
            held = [post_and_hold(server.url, True, ours, n=WIDE, max_tokens=1800, **ENDLESS) for _ in range(ROOM)]
            wait_for(lambda: prometheus.one("helmsight_waiting") == ROOM * WIDE - Settings().slots, PATIENCE)
            ask(ours, n=WIDE)
            for connection in held:
                connection.close()
            sent["200"] += ROOM
            wait_for(lambda: counted() == sent, PATIENCE)
            assert sent == {"200": 2 * len(CHATS) + 1 + 2 + ROOM, "401": 2, "429": 3 + 1}

            # The target is up, by its key; all rules are understood, and none has anybody called.
            assert requests.get(server.url + "/metrics", timeout=PATIENCE).status_code == 401
            assert prometheus.one('up{job="helmsight"}') == 1
            rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
            assert [rule["name"] for rule in rules] == [rule.get("alert") or rule["record"] for rule in RULES]
            assert {(rule["health"], rule.get("state", "inactive")) for rule in rules} == {("ok", "inactive")}

            # No panel is empty, and no alert asks for what never is.
            chosen = PANELS["templating"]["list"][0]["query"]
            metric, label = re.findall(r"label_values\((\w+), (\w+)\)", chosen)[0]
            assert prometheus.ask(f"label/{label}/values?match[]={metric}") == [server.url.removeprefix("http://")]
            empty = set()
            for panel in PANELS["panels"]:
                for target in panel["targets"]:
                    expression = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
                    if not finite(prometheus, expression):
                        empty.add(expression.replace('{instance=~".*"}', ""))
            for rule in RULES:
                prometheus.values(rule["expr"])
                for selector in re.findall(r"\b(?:helmsight_\w+|up)(?:\{[^}]*\})?", rule["expr"]):
                    if not finite(prometheus, selector):
                        empty.add(selector)
            assert empty == EMPTY.keys()

            # The journal in PostgreSQL has every answer, the log every request.
            rows, answers = "SELECT count(*) FROM helmsight_journal", sent["200"] + ROOM * (WIDE - 1)
            wait_for(lambda: postgres.run(database["POSTGRES_DB"], rows) == [(answers,)], PATIENCE)
            lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
            logged = Counter(str(line["status"]) for line in lines if line.get("route") == CHAT)
            assert logged == sent

            # A server that is gone is soon an alert.
            server.end()
            wait_for(lambda: [alert["state"] for alert in prometheus.ask("alerts")["alerts"]] == ["pending"], PATIENCE)
            (alert,) = prometheus.ask("alerts")["alerts"]
            assert alert["labels"]["alertname"] == "HelmsightDown"
