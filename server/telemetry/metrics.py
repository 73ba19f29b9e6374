"""Prometheus metrics of one application: requests, latency, tokens, the engine's state, the requested features."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest

from server.engine.runtime import Runtime
from server.journal.entry import JOINED, group_of, toward_of
from server.journal.scalars import scalars
from server.journal.writer import Journal
from server.telemetry.collectors import EngineCollector, JournalCollector, KeyCollector
from server.telemetry.refusals import RequestCounters
from steering import Choice, Request
from steering.protocol.readout import REGISTRY as READOUTS
from steering.protocol.readout import Quantity

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
WIDE = tuple(base * 10.0**power for power in range(-3, 4) for base in (1, 3))
"""Buckets of numbers that have no description; with one below 0, Prometheus would have no sum of them."""
DOSE = Quantity(
    "Mean steering dose: the norm of the added vectors as a share of the residual stream's",
    buckets=(0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 5.0),
)
LABELS = ("model", "intervention", "source")
"""The labels of the numbers of answers, as `Traffic` has them."""
SEVERAL = "several"
NONE = "none"
"""The kind of intervention of an answer without any."""
CORRECT = "correct"
"""The truth value that has a counter of its own and is no flag."""


class Traffic(NamedTuple):
    """The labels of the numbers of answers; each has few values.

    `intervention` is the group in which the journal counts an answer, or `SEVERAL` if that joins several.
    """

    model: str
    intervention: str
    source: str

    @classmethod
    def of(cls, model: str, request: Request, source: str) -> Traffic:
        """Return the labels of a request's answers."""
        group = group_of(request.asked, toward_of(request.asked))
        return cls(model, SEVERAL if JOINED in group else group, source)


class Metrics(RequestCounters):
    """The counters of one application in a registry of its own, so that a process may hold several.

    `journal_readouts` are computed of every answer; `expiries` returns the times at which keys expire, by name.
    """

    def __init__(
        self,
        runtime: Runtime,
        journal: Journal,
        journal_readouts: Iterable[str],
        expiries: Callable[[], Mapping[str, datetime]],
    ):
        registry = CollectorRegistry()
        registry.register(EngineCollector(runtime))
        registry.register(JournalCollector(journal, journal_readouts))
        registry.register(KeyCollector(expiries))
        ProcessCollector(registry=registry)
        super().__init__(registry)
        self.of_keys = Counter(
            "helmsight_key_requests", "HTTP requests by the name of their key", ["key", "status"], registry=registry
        )
        self.latency = Histogram(
            "helmsight_request_seconds", "Time to the last byte", ["route"], buckets=SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "helmsight_time_to_first_token_seconds",
            "Time from the request to its first token",
            buckets=SECONDS,
            registry=registry,
        )
        self.disconnects = Counter(
            "helmsight_disconnects",
            "Answers cancelled: client disconnected, or timed out",
            ["reason"],
            registry=registry,
        )
        self.choices = Counter("helmsight_choices", "Finished answers", ["finish_reason", "source"], registry=registry)
        self.interventions = Counter(
            "helmsight_interventions", "Requested interventions", ["kind", "toward"], registry=registry
        )
        self.answer_tokens = Counter(
            "helmsight_intervention_tokens", "Tokens of finished answers, by intervention", ["kind"], registry=registry
        )
        self.answer_seconds = Counter(
            "helmsight_intervention_decode_seconds",
            "Time between the first and the last token of finished answers, by intervention",
            ["kind"],
            registry=registry,
        )
        self._guarded = Counter("helmsight_guarded", "Guarded answers by outcome", ["outcome"], registry=registry)
        self._guard_raised = Counter(
            "helmsight_guard_raised", "First answers that met a guard's condition", ["condition"], registry=registry
        )
        self._guard_changed = Counter(
            "helmsight_guard_changed", "Guarded answers whose kept text differs from the first one's", registry=registry
        )
        self._guard_tokens = Counter(
            "helmsight_guard_tokens", "Tokens that guards had generated beside first answers", registry=registry
        )
        self.readouts = Counter("helmsight_diagnostics", "Requested readouts", ["readout"], registry=registry)
        declared = [
            (name, kind, readout.quantities.get(name))
            for readout in READOUTS.values()
            for name, kind in readout.scalars.items()
        ]
        self.truths = frozenset(name for name, kind, _ in declared if kind is bool) - {CORRECT}
        numbers = {name: quantity for name, kind, quantity in declared if kind is float} | {"dose": DOSE}
        self.histograms = {name: _histogram(name, quantity, registry) for name, quantity in numbers.items()}
        self.flags = Counter(
            "helmsight_flags", "Finished answers by flag", ["flag", "raised", *LABELS], registry=registry
        )
        self.focus = Counter(
            "helmsight_focus",
            "Finished answers whose focused image was the target",
            ["correct", *LABELS],
            registry=registry,
        )

    def guarded(self, report: Mapping[str, Any]) -> None:
        """Count the tries of a guarded choice: the outcome, the conditions met, what changed, and the cost."""
        first, *others = report["answers"]
        self._guarded.labels(report["outcome"]).inc()
        for condition in first["raised"]:
            self._guard_raised.labels(condition).inc()
        self._guard_changed.inc(report["answers"][report["kept"]]["text"] != first["text"])
        self._guard_tokens.inc(sum(answer["completion_tokens"] for answer in others))

    def accepted(self, request: Request) -> None:
        """Count the interventions and readouts of an accepted request."""
        for name, intervention in request.asked.items():
            for toward in intervention.toward:
                self.interventions.labels(name, toward).inc()
        if request.baseline:
            self.interventions.labels("baseline", "").inc()
        for readout in sorted(request.readouts.include) if request.readouts else ():
            self.readouts.labels(readout).inc()

    def finished(self, choice: Choice, kinds: Collection[str], traffic: Traffic) -> None:
        """Count a finished answer under these kinds of interventions, and the values of its diagnostics."""
        self.choices.labels(choice.finish_reason, traffic.source).inc()
        for kind in kinds or (NONE,):
            self.answer_tokens.labels(kind).inc(len(choice.token_ids))
            if choice.timing is not None:
                self.answer_seconds.labels(kind).inc(choice.timing.last - choice.timing.first)
        numbers = scalars(choice.applied, choice.diagnostics)
        for name, value in numbers.items():
            if name in self.histograms and value is not None:
                self.histograms[name].labels(*traffic).observe(value)
            if name in self.truths and value is not None:
                self.flags.labels(name, _word(value), *traffic).inc()
        if (correct := numbers.get(CORRECT)) is not None:
            self.focus.labels(_word(correct), *traffic).inc()

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def _histogram(name: str, quantity: Quantity | None, registry: CollectorRegistry) -> Histogram:
    quantity = quantity or Quantity(name)
    unit = f" ({quantity.unit})" if quantity.unit else ""
    text, buckets = f"{quantity.about}{unit}, of finished answers", quantity.buckets or WIDE
    return Histogram(f"helmsight_{name}", text, LABELS, buckets=buckets, registry=registry)


def _word(value: object) -> str:
    return str(value).lower()
