"""Combined answers of all replicas to /health, /ready and /metrics, with which one process reports on itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from server.encode import dumps
from server.replicas.call import AnswerHead, Whole

LABEL, FRONT = "replica", "front"
JSON = (("Content-Type", "application/json"),)


def health(reports: Sequence[Whole], own: bytes = b"") -> Whole:
    """Return 200 unless all replicas must be replaced; if there is none, Ray Serve is already starting one."""
    return _healthiest(reports, {"status": "ok"}, 200)


def ready(reports: Sequence[Whole], own: bytes = b"") -> Whole:
    """Return 200 while at least one replica serves requests."""
    return _healthiest(reports, {"status": "loading"}, 503)


def _healthiest(reports: Sequence[Whole], none: dict[str, Any], status: int) -> Whole:
    """Return the healthiest replica's report, with the journals combined and each replica's own under `replicas`."""
    bodies = {report.replica: json.loads(report.body) for report in reports}
    if not reports:
        head, best = AnswerHead(status, (*JSON, *([("Retry-After", "2")] if status == 503 else []))), none
    else:
        first = min(reports, key=lambda report: report.head.status)
        best = bodies[first.replica]
        head = AnswerHead(first.head.status, tuple(pair for pair in first.head.headers if pair[0] != "Content-Length"))
    journals = [report["journal"] for report in bodies.values() if "journal" in report]
    body = dumps({**best, **({"journal": _journal(journals)} if journals else {}), "replicas": bodies}).encode()
    return Whole("", AnswerHead(head.status, (*head.headers, ("Content-Length", str(len(body))))), body)


def _journal(journals: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst journal state, with the row counts of all replicas added up."""
    worst = max(journals, key=lambda journal: journal["state"] == "failing")
    return worst | {
        name: sum(journal[name] for journal in journals) for name in ("written", "dropped", "waiting") if name in worst
    }


class Labelled:
    """The metrics of all replicas, each sample labelled with its replica's name."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families, as a registry does."""
        families: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += _labelled(family.samples, name)
        yield from families.values()


def _labelled(samples: Iterable[Sample], name: str) -> Iterator[Sample]:
    for sample in samples:
        yield Sample(sample.name, {LABEL: name, **sample.labels}, sample.value, sample.timestamp, sample.exemplar)


def metrics(reports: Sequence[Whole], own: bytes = b"") -> Whole:
    """Return Prometheus' text with a label `replica`, or a replica's refusal, as for a missing key.

    `own` holds the front's own metrics.
    """
    refused = [report for report in reports if report.head.status != 200]
    if refused:
        return refused[0]
    texts = {FRONT: own.decode(), **{report.replica: report.body.decode() for report in reports}}
    text = generate_latest(Labelled(texts))
    return Whole("", AnswerHead(200, (("Content-Type", CONTENT_TYPE_LATEST),)), text)


ROUTES: Mapping[str, Callable[[Sequence[Whole], bytes], Whole]] = MappingProxyType(
    {"/health": health, "/ready": ready, "/metrics": metrics}
)
