"""Prometheus may read the metrics by which Kubernetes scales, with the key that the files of deploy/ have made for it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.app import create_app
from server.cli import main
from server.settings import Settings
from tests.server.deploy.test_files import ADAPTER, BASE, COMPOSE, DEPLOY, OBJECTS, SCRAPES, SERVER, needs, passes
from tests.server.fakes import FakeEngine

ROOT = DEPLOY.parent
VALUES = yaml.safe_load(SCRAPES.read_text())
(JOB,) = yaml.safe_load(VALUES["extraScrapeConfigs"])
KUSTOMIZATION = (BASE / "kustomization.yaml").read_text()


def test_the_key_that_is_made_for_prometheus_reads_the_metrics_and_nothing_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = re.findall(r"(?m)^#   helmsight (keys add .+) > metrics.key$", KUSTOMIZATION)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    key = capsys.readouterr().out.strip()
    (tmp_path / "keys").write_text("a-key-of-a-client\n")
    environ = {one["name"]: one.get("value", "") for one in SERVER["env"]}
    (mounted,) = [one["mountPath"] for one in SERVER["volumeMounts"] if one["name"] == "keys"]
    files = {name: environ[f"HELMSIGHT_{name.upper()}"] for name in ("api_key_file", "named_key_file")}
    assert {str(Path(file).parent) for file in files.values()} == {mounted}
    settings: dict[str, Any] = {name: str(tmp_path / Path(file).name) for name, file in files.items()}
    client = create_app(Settings(vectors=(), **settings), engine=FakeEngine()).test_client()  # type: ignore[arg-type]
    shown = {"Authorization": f"{JOB['authorization']['type']} {key}"}
    answer = client.get(JOB["metrics_path"], headers=shown)
    assert answer.status_code == 200
    assert "helmsight_waiting " in answer.text
    assert client.get(JOB["metrics_path"]).status_code == 401
    assert client.post("/v1/chat/completions", json={}, headers=shown).status_code == 403


def test_the_key_of_composes_prometheus_reads_the_metrics_and_asks_for_no_answers(
    tmp_path: Path,
) -> None:
    """The commands in the first lines of the file are run, and files are mounted where the file says."""
    lines = "".join(re.findall(r"(?m)^#   (.+\n)", (DEPLOY / "compose.yaml").read_text().partition("\nname:")[0]))
    program = f"{sys.executable} -m server.cli"
    script = lines.partition("export")[0].replace("helmsight keys", f"PYTHONPATH={ROOT} {program} keys")
    (tmp_path / "deploy").mkdir()
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True, env=os.environ)
    secrets = tmp_path / "deploy" / "secrets"
    assert secrets.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o444 for path in secrets.rglob("*")} == {0o444}, "users of the containers read them"
    services, scraped = COMPOSE["services"], yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]

    def file(service: str, path: str) -> Path:
        """Return the file on this machine that a container has at a path."""
        mounts = {f"/run/secrets/{name}": COMPOSE["secrets"][name]["file"] for name in services[service]["secrets"]}
        for volume in services[service]["volumes"]:
            source, target, *_ = volume.split(":")
            mounts[target] = source
        (target,) = [target for target in mounts if path == target or path.startswith(f"{target}/")]
        return tmp_path / "deploy" / (mounts[target] + path.removeprefix(target))

    environ = services["helmsight"]["environment"]
    settings: dict[str, Any] = {
        name: str(file("helmsight", environ[f"HELMSIGHT_{name.upper()}"]))
        for name in ("api_key_file", "named_key_file")
    }
    client = create_app(Settings(vectors=(), **settings), engine=FakeEngine()).test_client()  # type: ignore[arg-type]
    key = file("prometheus", job["authorization"]["credentials_file"]).read_text().strip()
    assert key != (secrets / "api_key").read_text().strip()
    shown = {"Authorization": f"Bearer {key}"}
    assert client.get(job["metrics_path"], headers=shown).status_code == 200
    refused = client.post("/v1/chat/completions", json={}, headers=shown)
    assert (refused.status_code, refused.json["error"]["code"]) == (403, "missing_role")


def test_prometheus_finds_the_pods_and_its_key() -> None:
    (mount,) = VALUES["server"]["extraSecretMounts"]
    secret, key = re.findall(r"-n monitoring create secret generic (\S+) --from-file=(\w+)=metrics.key", KUSTOMIZATION)[
        0
    ]
    assert secret == mount["secretName"]
    assert JOB["authorization"]["credentials_file"] == f"{mount['mountPath']}/{key}"
    (served,) = JOB["kubernetes_sd_configs"]
    assert served["namespaces"]["names"] == [yaml.safe_load(KUSTOMIZATION)["namespace"]]
    kept, *given = JOB["relabel_configs"]
    (labels,) = [one["pairs"] for one in yaml.safe_load(KUSTOMIZATION)["labels"]]
    pod = {f"__meta_kubernetes_pod_label_{re.sub('[./]', '_', name)}": value for name, value in labels.items()}
    pod["__meta_kubernetes_pod_container_port_name"] = SERVER["ports"][0]["name"]
    assert re.fullmatch(kept["regex"], ";".join(pod[name] for name in kept["source_labels"]))
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]["custom"]
    assert {one["target_label"] for one in given} == rule["resources"]["overrides"].keys()
    allowed = OBJECTS["NetworkPolicy"]["spec"]["ingress"][0]["from"]
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in allowed


@needs("promtool")
def test_promtool_reads_what_the_chart_is_given(tmp_path: Path) -> None:
    """All but where pods are found, of which Debian's build knows nothing."""
    job = {**JOB, "static_configs": [{"targets": ["helmsight:8000"]}]}
    del job["kubernetes_sd_configs"]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": [job]}))
    passes("promtool", "check", "config", "--syntax-only", str(file))
