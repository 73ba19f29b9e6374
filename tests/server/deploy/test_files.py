"""The files of deploy/ agree with the code: ports, routes, settings, times, the names of metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import kubernetes_validate as schemas
import pytest
import yaml

import steering
from server import settings as server_settings
from server.access.auth import OPEN_ROUTES
from server.commands.example import example
from server.process.sources import PREFIX
from server.process.worker import DRAIN_MARGIN
from server.settings import Settings
from server.telemetry.logs import WELL_FORMED
from tests.server.telemetry.exposed import families

DEPLOY = Path(__file__).parents[3] / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NGINX = (DEPLOY / "nginx.conf").read_text()
UNIT = (DEPLOY / "helmsight.service").read_text()
ADAPTER, SCRAPES = BASE / "prometheus-adapter.yaml", BASE / "prometheus.yaml"
IMAGE = dict(re.findall(rf"\b{PREFIX}(\w+)=(\S+)", (DEPLOY / "Dockerfile").read_text()))
PORT = int(IMAGE["PORT"])
NAMED_KEYS = "./secrets/named"
"""The folder of compose's file of named keys, which the first lines of its file make."""
SECONDS = Settings().graceful_timeout + DRAIN_MARGIN
"""From SIGTERM until a server at its work has ended."""


def texts() -> dict[str, str]:
    files = (file for file in DEPLOY.rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {str(file.relative_to(DEPLOY)): file.read_text() for file in files}


def objects() -> dict[str, Any]:
    """Return the base's objects by kind, as they stand in its files."""
    listed = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    assert {BASE / name for name in listed} == set(BASE.glob("*.yaml")) - {
        BASE / "kustomization.yaml",
        ADAPTER,
        SCRAPES,
    }
    found = [yaml.safe_load((BASE / name).read_text()) for name in listed]
    return {one["kind"]: one for one in found}


OBJECTS = objects()
POD = OBJECTS["Deployment"]["spec"]["template"]["spec"]
(SERVER,) = POD["containers"]


@pytest.mark.parametrize("name", sorted(texts()))
def test_files_set_only_variables_that_exist(name: str) -> None:
    known = {field.upper() for field in Settings.model_fields} | {"CONFIG"}
    assert set(re.findall(rf"\b{PREFIX}([A-Z_]+[A-Z])\b", texts()[name])) <= known


def test_the_example_has_every_setting_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    file = (DEPLOY / "helmsight.toml").read_text()
    assert tomllib.loads(file) == {}
    monkeypatch.setattr(server_settings, "DEFAULT_JOURNAL", "~/.helmsight/journal.db")
    assert file == example(), "python -m server.commands.example > deploy/helmsight.toml"
    taken = tomllib.loads("\n".join(re.findall(r"(?m)^# (\w+ = .+)$", file.partition("# == Presets")[0])))
    assert Settings(**taken) == Settings()
    unset = set(re.findall(r"(?m)^# (\w+) =$", file))
    tables = {name for name, field in Settings.model_fields.items() if get_origin(field.annotation) is dict}
    assert taken.keys() | unset == Settings.model_fields.keys() - tables
    preset = tomllib.loads("\n".join(re.findall(r"(?m)^# (.+)$", file.partition("# == Presets")[2])))
    assert preset["presets"]["careful"]["steering"] == {"toward": "vision", "strength": 0.5}


def test_probes_ask_what_needs_no_key() -> None:
    probes = {kind: SERVER[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/ready", "readiness": "/ready", "liveness": "/health",
    }  # fmt: skip
    assert {probe["path"] for probe in probes.values()} < set(OPEN_ROUTES)
    assert {probe["port"] for probe in probes.values()} == {"http"}


def test_ports_are_the_images() -> None:
    assert SERVER["ports"] == [{"name": "http", "containerPort": PORT}]
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == "http"
    ingress = OBJECTS["NetworkPolicy"]["spec"]["ingress"][0]["ports"]
    assert [port["port"] for port in ingress] == [PORT]
    assert COMPOSE["services"]["helmsight"]["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    scraped = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"helmsight:{PORT}"]}]
    assert f"server 127.0.0.1:{Settings().port} " in NGINX


def test_selectors_find_the_pods() -> None:
    labels = yaml.safe_load((BASE / "kustomization.yaml").read_text())["labels"]
    assert [one["includeTemplates"] for one in labels] == [True]
    (pairs,) = [one["pairs"] for one in labels]
    assert OBJECTS["Service"]["spec"]["selector"] == pairs
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert OBJECTS[kind]["spec"]["selector"] == {"matchLabels": pairs}
    assert OBJECTS["NetworkPolicy"]["spec"]["podSelector"] == {"matchLabels": pairs}
    scaled = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (scaled["kind"], scaled["name"]) == ("Deployment", OBJECTS["Deployment"]["metadata"]["name"])


def test_pods_have_no_rights_and_write_nowhere_but_into_volumes() -> None:
    assert POD["securityContext"]["runAsNonRoot"]
    assert f"\nUSER {POD['securityContext']['runAsUser']}\n" in (DEPLOY / "Dockerfile").read_text()
    own = SERVER["securityContext"]
    assert own == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    mounted = {mount["mountPath"] for mount in SERVER["volumeMounts"]}
    environ = {one["name"]: one.get("value") for one in SERVER["env"]}
    assert {IMAGE["VECTORS"], environ["HOME"], "/dev/shm"} <= mounted
    assert {mount["name"] for mount in SERVER["volumeMounts"]} == {volume["name"] for volume in POD["volumes"]}
    kept = Path(environ[f"{PREFIX}COMPILED_FOLDER"])
    (volume,) = [mount["name"] for mount in SERVER["volumeMounts"] if Path(mount["mountPath"]) == kept.parent]
    (source,) = [one["emptyDir"] for one in POD["volumes"] if one["name"] == volume]
    assert source["medium"] == "Memory", "others have no sticky bit, without which the folder is not used"
    secret = {"secretKeyRef": {"name": "helmsight-journal", "key": "url"}}
    assert {"name": f"{PREFIX}JOURNAL", "valueFrom": secret} in SERVER["env"]
    assert POD["automountServiceAccountToken"] is False
    compose = COMPOSE["services"]["helmsight"]
    assert compose["tmpfs"] == ["/tmp:exec"], "compiled steps are loaded from there"
    assert (compose["read_only"], compose["cap_drop"], compose["environment"]["HOME"]) == (True, ["ALL"], "/tmp")


def test_the_unit_accepts_named_keys_that_its_first_lines_make() -> None:
    given = dict(re.findall(rf"(?m)^Environment={PREFIX}(\w+)=(\S+)$", UNIT))
    assert set(given) == {"NAMED_KEY_FILE"}, (
        "keys that change without a restart, which a credential of systemd does not"
    )
    path = given["NAMED_KEY_FILE"]
    assert re.search(rf"(?m)^#   /opt/helmsight/bin/helmsight keys add \w+ --file {path} && chmod 644 {path}$", UNIT)
    assert re.search(r"(?m)^DynamicUser=yes$", UNIT), (
        "a user of its own, which cannot read a file of mode 600 of root's"
    )


def test_running_answers_get_their_time_everywhere() -> None:
    before = SERVER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] > before + SECONDS
    assert int(COMPOSE["services"]["helmsight"]["stop_grace_period"].removesuffix("s")) > SECONDS
    assert int(re.findall(r"TimeoutStopSec=(\d+)", UNIT)[0]) > SECONDS


def test_nginx_lets_through_what_the_server_allows() -> None:
    bounds = dict(re.findall(r"(?m)^ +(\w+) (\d+)[ms];", NGINX))
    settings = Settings()
    assert int(bounds["client_max_body_size"]) * server_settings.MEBI > settings.max_body
    assert int(bounds["proxy_read_timeout"]) > settings.request_timeout
    assert int(bounds["client_body_timeout"]) >= settings.read_timeout
    assert "proxy_buffering off;" in NGINX
    (pattern,) = re.findall(r'"~(\S+)" \$http_x_request_id', NGINX)
    for given in ("abc-1:4/x=@+", "x" * 128, "x" * 129, "a b", "", "grün", 'a"b'):
        assert bool(re.search(pattern, given)) == bool(WELL_FORMED.fullmatch(given)), given


def test_a_pod_has_as_many_threads_as_it_asks_for_processors() -> None:
    """Nothing bounds its time, so that the engine would take a thread for each processor of the node."""
    gpu = yaml.safe_load((DEPLOY / "kubernetes" / "gpu" / "model.yaml").read_text())["spec"]["template"]["spec"]
    for container in (SERVER, gpu["containers"][0]):
        assert "cpu" not in container["resources"]["limits"]
        assert int(container["resources"]["requests"]["cpu"]) >= 1, "whole ones: threads are"
    source = {"resourceFieldRef": {"containerName": SERVER["name"], "resource": "requests.cpu"}}
    assert {"name": f"{PREFIX}THREADS", "valueFrom": source} in SERVER["env"]


def test_secrets_stand_in_no_file() -> None:
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if "PASSWORD" in name:
                assert value.startswith("${"), name
    assert "${POSTGRES_PASSWORD" in COMPOSE["services"]["helmsight"]["environment"][f"{PREFIX}JOURNAL"]
    assert not any(one.get("kind") == "Secret" for one in OBJECTS.values())


def test_secrets_of_compose_are_files_that_neither_git_nor_the_image_takes() -> None:
    """Compose writes a secret of a variable into the container, which fails where that is read-only."""
    for service in COMPOSE["services"].values():
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()
    assert COMPOSE["secrets"] == {name: {"file": f"./secrets/{name}"} for name in ("api_key", "metrics_key")}
    assert COMPOSE["services"]["helmsight"]["environment"][f"{PREFIX}API_KEY_FILE"] == "/run/secrets/api_key"
    for ignored in (".gitignore", ".dockerignore"):
        assert "deploy/secrets" in (DEPLOY.parent / ignored).read_text().replace("secrets/", "secrets").splitlines()


def test_what_compose_mounts_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in {*COMPOSE["volumes"], NAMED_KEYS} or (DEPLOY / source).is_file(), volume


def asked(name: str, text: str) -> Iterator[str]:
    """Yield the metrics that a file of rules or of panels asks for."""
    source = json.dumps(json.loads(text)["panels"]) if name.endswith(".json") else text
    yield from re.findall(r"\b(?:helmsight|process)_\w+", source)


def test_rules_and_panels_ask_for_metrics_that_exist(engine: steering.Engine, tmp_path: Path) -> None:
    known = families(engine, tmp_path)
    suffixed = {
        f"{name}_{part}" for name, kind in known.items() if kind == "histogram" for part in ("bucket", "sum", "count")
    }
    names = ("monitoring/alerts.yml", "monitoring/dashboard.json", str(ADAPTER.relative_to(DEPLOY)))
    for name in names:
        found = set(asked(name, texts()[name]))
        assert found, name
        assert found <= known.keys() | suffixed, f"{sorted(found - known.keys() - suffixed)} of {name}"
    scaled = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert rule["name"]["as"] == scaled
    assert known[scaled] == "gauge"


def test_panels_are_told_apart() -> None:
    panels = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels) > 12
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)


def passes(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def folders(path: Path) -> str:
    """Return settings that make nginx put its files below a path.

    The folder that it was built for may not exist, or may belong to another user.
    """
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {path}/{kind};" for kind in kinds)


@needs("nginx")
def test_nginx_reads_its_file(tmp_path: Path) -> None:
    server = NGINX.replace("/var/log/nginx", str(tmp_path)).replace("listen 80;", "listen 127.0.0.1:18080;")
    (tmp_path / "helmsight.conf").write_text(server)
    (tmp_path / "nginx.conf").write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} "
        f"http {{ {folders(tmp_path)} include {tmp_path}/helmsight.conf; }}"
    )
    passes("nginx", "-t", "-c", str(tmp_path / "nginx.conf"), "-e", f"{tmp_path}/error.log")


@needs("promtool")
def test_promtool_reads_rules_and_settings() -> None:
    passes("promtool", "check", "rules", str(DEPLOY / "monitoring" / "alerts.yml"))
    passes("promtool", "check", "config", "--syntax-only", str(DEPLOY / "monitoring" / "prometheus.yml"))


@needs("systemd-analyze")
def test_systemd_reads_its_unit(tmp_path: Path) -> None:
    unit = tmp_path / "helmsight.service"
    unit.write_text(UNIT.replace("/opt/helmsight/bin/helmsight", shutil.which("true") or ""))
    passes("systemd-analyze", "verify", str(unit))


@pytest.mark.skipif(sys.platform == "win32", reason="hadolint is not built for it")
def test_hadolint_finds_no_fault_in_the_image() -> None:
    hadolint = str(Path(sys.executable).parent / "hadolint")
    passes(hadolint, "--ignore", "DL3013", str(DEPLOY / "Dockerfile"))  # versions are ranges, in pyproject.toml


@pytest.mark.parametrize("kind", sorted(OBJECTS))
def test_kubernetes_knows_every_field(kind: str) -> None:
    schemas.validate(OBJECTS[kind], schemas.latest_version(), strict=True)


@needs("kubectl")
@pytest.mark.parametrize("name", ["base", "gpu"])
def test_kustomize_builds(name: str) -> None:
    passes("kubectl", "kustomize", str(DEPLOY / "kubernetes" / name))


def test_rules_and_panels_ask_for_series_that_a_rule_records() -> None:
    rules = (rule for group in yaml.safe_load(texts()["monitoring/alerts.yml"])["groups"] for rule in group["rules"])
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for name in ("monitoring/alerts.yml", "monitoring/dashboard.json"):
        asked_for = set(re.findall(r"\bhelmsight:[\w:]+", texts()[name]))
        assert asked_for, name
        assert asked_for <= recorded, name


def test_every_alert_is_on_a_page_and_the_board_shows_alerts() -> None:
    rules = [rule for group in yaml.safe_load(texts()["monitoring/alerts.yml"])["groups"] for rule in group["rules"]]
    alerts = {rule["alert"] for rule in rules if "alert" in rule}
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert set(re.findall(r"(?m)^\| `(Helmsight\w+)` \|", page)) == alerts
    assert len(alerts) > 9
    panels = json.loads(texts()["monitoring/dashboard.json"])["panels"]
    (shown,) = re.findall('ALERTS{alertname=~"([^"]+)', " ".join(one["expr"] for p in panels for one in p["targets"]))
    assert all(re.fullmatch(shown, alert) for alert in alerts)
