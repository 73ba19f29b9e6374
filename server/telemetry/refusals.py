"""What is counted of every request, also where no application gets to see it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


def requests_counter(registry: CollectorRegistry) -> Counter:
    """Requests by how they ended."""
    return Counter("helmsight_requests", "HTTP requests", ["route", "method", "status"], registry=registry)


def refusals_counter(registry: CollectorRegistry) -> Counter:
    """Those that got an error."""
    said = "Requests that were refused, by the code of the error"
    return Counter("helmsight_refusals", said, ["status", "reason"], registry=registry)


def count_unread(requests: Counter, refusals: Counter, status: int, reason: str) -> None:
    """Count one that no application has read."""
    requests.labels("unread", "other", str(status)).inc()
    refusals.labels(str(status), reason).inc()
