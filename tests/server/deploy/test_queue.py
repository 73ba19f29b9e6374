"""The number by which Kubernetes scales, from a server under load by way of a real Prometheus: the answers that wait."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.server.access.conftest import KeyFile
from tests.server.api.test_streams import post_and_hold
from tests.server.deploy.stack import EVERY, Root, lacking, prometheus, serving
from tests.server.deploy.test_files import ADAPTER, OBJECTS, SERVER
from tests.server.deploy.test_scrapes import JOB
from tests.server.process.servers import PATIENCE
from tests.server.process.test_gunicorn import ENDLESS
from tests.waiting import wait_for

LACKING = lacking("prometheus")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=f"not installed: {', '.join(LACKING)}")]

WAITING = 5


def test_the_autoscaler_sees_how_many_wait(tmp_path: Path) -> None:
    pod, watcher = Root(tmp_path / "pod"), Root(tmp_path / "watcher")
    pod.put("/etc/helmsight/keys", "a-key-of-a-client\n")
    key = KeyFile(tmp_path / "pod" / "etc" / "helmsight" / "keys.json").add("prometheus", "journal")
    watcher.put(JOB["authorization"]["credentials_file"], key["Authorization"].removeprefix("Bearer ") + "\n")
    told = {one["name"]: one["value"] for one in SERVER["env"] if "value" in one and one["name"] != "HOME"}
    del told["HELMSIGHT_COMPILED_FOLDER"]
    server = serving(pod, HELMSIGHT_SLOTS="1", **told)
    address = server.url.removeprefix("http://")

    def found(container: str) -> dict[str, object]:
        """Return a pod as Prometheus' discovery describes it, which Debian's build lacks."""
        labels = {"pod_label_app_kubernetes_io_name": "helmsight", "namespace": "helmsight", "pod_name": "helmsight-0"}
        named = {f"__meta_kubernetes_{name}": value for name, value in labels.items()}
        return {"targets": [address], "labels": {**named, "__meta_kubernetes_pod_container_port_name": container}}

    job = {name: value for name, value in JOB.items() if name != "kubernetes_sd_configs"}
    job |= {"static_configs": [found("http"), found("another")]}
    scraped = yaml.safe_dump({"global": {"scrape_interval": EVERY}, "scrape_configs": [job]})
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    name = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    query = rule["metricsQuery"].replace("<<.Series>>", name)
    query = query.replace("<<.LabelMatchers>>", 'namespace="helmsight",pod=~"helmsight-0"')
    with ExitStack() as stack:
        stack.callback(server.end)
        file = "--config.file=/etc/prometheus/prometheus.yml"
        watching = stack.enter_context(prometheus([file], watcher, scraped))
        server.wait_until_ready()
        wait_for(lambda: watching.values(query) != [], PATIENCE)
        assert watching.one(query) == 0
        shown = {"Authorization": "Bearer a-key-of-a-client"}
        held = [
            stack.enter_context(post_and_hold(server.url, True, shown, max_tokens=1800, **ENDLESS))
            for _ in range(1 + WAITING)
        ]
        wait_for(lambda: watching.one("helmsight_waiting") == WAITING, PATIENCE)
        ((labels, value),) = watching.values(query)
        assert value == WAITING
        pod_labels = {one: labels[one] for one in rule["resources"]["overrides"]}
        assert pod_labels == {"namespace": "helmsight", "pod": "helmsight-0"}
        whose = {"__name__": "up", "job": "helmsight", "instance": address, **pod_labels}
        assert watching.values("up") == [(whose, 1)], "the pod's other port is left alone"
        assert watching.values(rule["seriesQuery"]) != [], "the adapter lists no metric without it"
        for connection in held:
            connection.close()
        wait_for(lambda: watching.one("helmsight_waiting") == 0, PATIENCE)
