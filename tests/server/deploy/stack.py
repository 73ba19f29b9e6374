"""The services of deploy/compose.yaml as local processes, with the commands, variables and files that it names."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.ports import own_port
from tests.server.deploy.test_files import DEPLOY
from tests.server.process.servers import PATIENCE, Server
from tests.waiting import wait_for

PASSWORDS = {"POSTGRES_PASSWORD": "a-password", "GRAFANA_PASSWORD": "another"}
COMPOSE = yaml.safe_load(
    re.sub(r"\$\{(\w+):\?[^}]*\}", lambda found: PASSWORDS[found[1]], (DEPLOY / "compose.yaml").read_text())
)
SERVICES = COMPOSE["services"]
SET = dict(
    re.findall(r"\b(HELMSIGHT_\w+)=(\S+)", "".join(re.findall(r"(?m)^ENV .*\n", (DEPLOY / "Dockerfile").read_text())))
)
"""Variables that the image sets."""
EVERY = "1s"
"""Between two scrapes, in place of 15 s."""


class Root:
    """A folder in the place of a container's root."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, path: str, text: str) -> None:
        """Write a file of the container."""
        file = Path(str(self.folder) + path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def placed(self, text: str) -> str:
        """Return a text in which the container's absolute paths are replaced by those of this machine."""
        return re.sub(r"(?<![\w/])(?=/(?:etc|run|tmp|vectors|journal|keys)\b)", str(self.folder), text)


class Prometheus:
    """A running one, asked by its HTTP API."""

    def __init__(self, command: list[str], root: Root, scraped: str):
        """`command` without its program. `scraped`: its file of settings, with the container's paths."""
        root.put("/etc/prometheus/prometheus.yml", root.placed(scraped))
        self.url = f"http://127.0.0.1:{(port := own_port())}"
        own = Path(f"{root.folder}/prometheus")
        own.mkdir()
        self.log = own / "log"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["prometheus", *map(root.placed, command), f"--web.listen-address=127.0.0.1:{port}",
                f"--storage.tsdb.path={own}/data"],  # where it is in the image, but not in Debian's package
                cwd=own, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def ask(self, path: str, **query: str) -> Any:
        """Return the API's answer to a query that it understands."""
        said = requests.post(f"{self.url}/api/v1/{path}", data=query, timeout=PATIENCE) if query else None
        answer = (said or requests.get(f"{self.url}/api/v1/{path}", timeout=PATIENCE)).json()
        assert answer["status"] == "success", (query, answer)
        return answer["data"]

    def values(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the current value of every series of an expression."""
        return [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=expression)["result"]]

    def one(self, expression: str) -> float:
        """Return the value of the only series; NaN without one."""
        found = self.values(expression)
        assert len(found) <= 1, (expression, found)
        return found[0][1] if found else math.nan

    def wait_until_ready(self) -> Prometheus:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with closing(requests.Session()) as session:
                try:
                    return session.get(f"{self.url}/-/ready", timeout=PATIENCE).ok
                except requests.ConnectionError:
                    return False

        wait_for(ready, PATIENCE)
        return self

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


@contextmanager
def prometheus(command: list[str], root: Root, scraped: str) -> Iterator[Prometheus]:
    """Run a Prometheus for the duration of the context."""
    started = Prometheus(command, root, scraped)
    try:
        yield started.wait_until_ready()
    finally:
        started.end()


@contextmanager
def composed(root: Root, journal: str, **more: str) -> Iterator[tuple[Server, Prometheus]]:
    """Compose's server and its Prometheus. journal: where its PostgreSQL is, in place of `@postgres/`. more: variables."""
    service = SERVICES["helmsight"]
    environ = {name: value.replace("@postgres/", journal) for name, value in (SET | service["environment"]).items()}
    del environ["HELMSIGHT_HOST"], environ["HELMSIGHT_PORT"]  # loopback, and a free one
    for folder in ("/tmp", *(volume.split(":")[1] for volume in service["volumes"])):
        Path(f"{root.folder}{folder}").mkdir(exist_ok=True)
    server = serving(root, **environ, **more)
    service = SERVICES["prometheus"]
    for volume in service["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            root.put(target, (DEPLOY / source).read_text())
    scraped = (DEPLOY / "monitoring" / "prometheus.yml").read_text()
    for old, new in (("helmsight:8000", server.url.removeprefix("http://")), ("15s", EVERY)):
        assert old in scraped
        scraped = scraped.replace(old, new)
    try:
        with prometheus(service["command"], root, scraped) as watching:
            yield server.wait_until_ready(), watching
    finally:
        server.end()


def serving(root: Root, **environ: str) -> Server:
    """Start a server with these environment variables of its container, without waiting until it is ready."""
    placed = {name: root.placed(value) for name, value in environ.items()} | {"HELMSIGHT_THREADS": "1"}
    return Server([sys.executable, "-m", "server.cli", "serve"], root.folder / "log", **placed)


def lacking(*programs: str) -> list[str]:
    """Programs that are not installed here."""
    return [program for program in programs if shutil.which(program) is None]
