"""Counters of every request, including those that no application sees."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class RequestCounters:
    """Requests by outcome, and those that got an error."""

    def __init__(self, registry: CollectorRegistry):
        self.registry = registry
        self.requests = Counter("helmsight_requests", "HTTP requests", ["route", "method", "status"], registry=registry)
        about = "Refused requests, by error code"
        self.refusals = Counter("helmsight_refusals", about, ["status", "reason"], registry=registry)

    def refused(self, status: int, reason: str) -> None:
        """Count a request that got an error instead of an answer."""
        self.refusals.labels(str(status), reason).inc()

    def unread(self, status: int, reason: str) -> None:
        """Count a request that no application has read."""
        self.requests.labels("unread", "other", str(status)).inc()
        self.refused(status, reason)
