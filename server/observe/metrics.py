"""Metrics of answers that are read for another engine: how many, with which outcome, and how far behind."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server, write_to_textfile

EVERY = 15.0
"""Seconds between two writings of a text file."""
DIFFERENCES = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class ObservedMetrics:
    """The counters of a run, in the registry of the server in this process or in one of their own.

    They are written to `file`, if given, for Prometheus' textfile collector, and served on `port` of loopback.
    """

    def __init__(self, registry: CollectorRegistry | None, file: Path | None = None, port: int | None = None) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self.answers = Counter(
            "helmsight_observed_answers", "Answers of another engine by outcome", ["outcome"], registry=self.registry
        )
        self.tokens = Counter(
            "helmsight_observed_tokens",
            "Tokens of answers of another engine, by whether they are those that were read",
            ["matched"],
            registry=self.registry,
        )
        self.prompts = Counter(
            "helmsight_observed_prompts",
            "Prompts of another engine, by whether they have as many tokens here",
            ["matched"],
            registry=self.registry,
        )
        self.differences = Histogram(
            "helmsight_observed_logprob_difference",
            "Largest difference of a token's log-probability to the other engine's (nats), of answers that were read",
            buckets=DIFFERENCES,
            registry=self.registry,
        )
        self.behind = Gauge(
            "helmsight_observed_behind_bytes", "Bytes of the file that were not read yet", registry=self.registry
        )
        self._file = file
        self._written = time.monotonic()
        self._server = None if port is None else start_http_server(port, "127.0.0.1", self.registry)

    @property
    def port(self) -> int | None:
        """The port on which metrics are served."""
        return None if self._server is None else int(self._server[0].server_port)

    def count(self, row: Mapping[str, Any]) -> None:
        """Count an answer by its row."""
        self.answers.labels(row["outcome"]).inc()
        if (tokens := row.get("tokens")) is None:
            return
        if tokens["by"] is not None:
            self.tokens.labels("false").inc(tokens["unmatched"])
            self.tokens.labels("true").inc(max(0, tokens["served"] - tokens["unmatched"]))
        if row["same_prompt"] is not None:
            self.prompts.labels(str(row["same_prompt"]).lower()).inc()
        if tokens["logprob_difference"] is not None:
            self.differences.observe(tokens["logprob_difference"])

    def write(self, now: bool = False) -> None:
        """Write the text file, if it is time or `now`."""
        if self._file is not None and (now or time.monotonic() - self._written >= EVERY):
            write_to_textfile(str(self._file), self.registry)
            self._written = time.monotonic()

    def close(self) -> None:
        """Write the text file for the last time, stop serving, and leave the registry."""
        self.write(now=True)
        for metric in (self.answers, self.tokens, self.prompts, self.differences, self.behind):
            self.registry.unregister(metric)
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
