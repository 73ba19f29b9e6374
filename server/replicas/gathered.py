"""What all replicas together say where one process tells of itself: /health, /ready and /metrics."""

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


def health(said: Sequence[Whole], own: bytes = b"") -> Whole:
    """200 unless all replicas are to be replaced; where there is none yet, or none any more, Ray Serve is at it."""
    return _whole(said, {"status": "ok"}, 200)


def ready(said: Sequence[Whole], own: bytes = b"") -> Whole:
    """200 while one replica at least serves requests."""
    return _whole(said, {"status": "loading"}, 503)


def _whole(said: Sequence[Whole], none: dict[str, Any], status: int) -> Whole:
    """What the replica says that does best, of the journal what holds for all, and under `replicas` what each says."""
    bodies = {one.replica: json.loads(one.body) for one in said}
    if not said:
        head, best = AnswerHead(status, (*JSON, *([("Retry-After", "2")] if status == 503 else []))), none
    else:
        first = min(said, key=lambda one: one.head.status)
        best = bodies[first.replica]
        head = AnswerHead(first.head.status, tuple(pair for pair in first.head.headers if pair[0] != "Content-Length"))
    journals = [one["journal"] for one in bodies.values() if "journal" in one]
    body = dumps({**best, **({"journal": _journal(journals)} if journals else {}), "replicas": bodies}).encode()
    return Whole("", AnswerHead(head.status, (*head.headers, ("Content-Length", str(len(body))))), body)


def _journal(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the one that is worst off says of it, with the rows of all."""
    worst = max(said, key=lambda one: one["state"] == "failing")
    return worst | {name: sum(one[name] for one in said) for name in ("written", "dropped", "waiting") if name in worst}


class Labelled:
    """The metrics of all replicas, each sample with the name of its own as a label."""

    def __init__(self, texts: Mapping[str, str]):
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """The families, as a registry has them."""
        families: dict[str, Metric] = {}
        for name, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                kept.samples += _labelled(family.samples, name)
        yield from families.values()


def _labelled(samples: Iterable[Sample], name: str) -> Iterator[Sample]:
    for one in samples:
        yield Sample(one.name, {LABEL: name, **one.labels}, one.value, one.timestamp, one.exemplar)


def metrics(said: Sequence[Whole], own: bytes = b"") -> Whole:
    """Prometheus' text with a label `replica`; a refusal, as for a missing key, is handed on. own: what the front counts."""
    refused = [one for one in said if one.head.status != 200]
    if refused:
        return refused[0]
    texts = {FRONT: own.decode(), **{one.replica: one.body.decode() for one in said}}
    text = generate_latest(Labelled(texts))  # type: ignore[arg-type]
    return Whole("", AnswerHead(200, (("Content-Type", CONTENT_TYPE_LATEST),)), text)


ROUTES: Mapping[str, Callable[[Sequence[Whole], bytes], Whole]] = MappingProxyType(
    {"/health": health, "/ready": ready, "/metrics": metrics}
)
