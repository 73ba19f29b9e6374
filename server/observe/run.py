"""Observing: answers of another engine are forced here, a bounded share and number of them, and their readouts are kept."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from probes.answering.base import Unanswered
from probes.answering.progress import Tracker
from probes.harness.options import check_file
from server.batches.file import ResponseFile, identity
from server.batches.pictures import NoPicture, with_pictures
from server.batches.pool import Pace, in_order
from server.batches.transport import Transport
from server.observe.forcing import body_of, reading
from server.observe.metrics import ObservedMetrics
from server.observe.served import FieldPaths, RequestFile, ServedAnswer, UnreadAnswer, answers_in
from server.observe.tail import FilePosition, Tail
from steering.protocol.readout import REGISTRY

EVERY = 60.0
"""Seconds between two reports on a file that is followed."""
AWAY = (429, 502, 503)
"""Statuses of a server that reads nothing now; any other failure is that of one answer, which must not stop the rest."""
SAVED = 1.0
"""Seconds between two writings of the place that was reached."""


@dataclass(frozen=True)
class ObserveOptions:
    """The file of answers, and how much of it is read.

    `requests` holds their requests, if these are elsewhere, and `pictures` the pictures that they name as files. `share` of
    the answers are read, the same ones each time (`seed`). `state` keeps the place that was reached. `out`, `metrics_file`
    and `metrics_port` are where results go beside the journal.
    """

    answers: Path
    requests: Path | None = None
    pictures: Path | None = None
    paths: FieldPaths = field(default_factory=FieldPaths)
    readouts: tuple[str, ...] | None = None
    follow: bool = False
    share: float = 1.0
    seed: int = 0
    at_once: int | None = None
    rate: float | None = None
    limit: int | None = None
    state: Path | None = None
    out: Path | None = None
    metrics_file: Path | None = None
    metrics_port: int | None = None
    quiet: bool = False

    @property
    def place(self) -> Path:
        """The file that keeps the place."""
        return self.state or self.answers.with_name(self.answers.name + ".observed")

    def check(self) -> None:
        """Raise ValueError or OSError for what cannot be used, before a model is loaded."""
        if unknown := [name for name in self.readouts or () if name not in REGISTRY]:
            raise ValueError(f"--readouts: unknown readout {unknown[0]!r}; there are {', '.join(REGISTRY)}")
        for path in (self.answers, self.requests):
            if path is not None:
                path.open("rb").close()
        for path in (self.place, self.out, self.metrics_file):
            if path is not None:
                check_file(path)


@dataclass
class ObserveReport:
    """The numbers of a run: answers by outcome, and tokens and prompts that differ.

    `behind` is the line up to which earlier runs have read, as the file `state` says.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    tokens: int = 0
    unmatched: int = 0
    prompts: int = 0
    difference: float | None = None
    reason: str | None = None
    behind: int = 0
    state: Path | None = None

    def count(self, row: Mapping[str, Any]) -> None:
        """Count a row."""
        self.outcomes[row["outcome"]] += 1
        if row["outcome"] != "read":
            self.reason = self.reason or f"{row['custom_id']}: {row['reason']}"
        if (tokens := row.get("tokens")) is None:
            return
        self.tokens += tokens["served"] or 0
        self.unmatched += tokens["unmatched"]
        self.prompts += row["same_prompt"] is False
        if (difference := tokens["logprob_difference"]) is not None:
            self.difference = max(difference, self.difference or 0.0)

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items())) or "no answers"
        parts = [
            f"{outcomes}; {self.unmatched} of {self.tokens} tokens unmatched; {self.prompts} prompts of another length"
        ]
        parts += [f"{self.left_out} left out by the share"] if self.left_out else []
        if self.difference is not None:
            parts.append(f"log-probabilities differ by at most {self.difference:.2g}")
        if self.behind:
            parts.append(
                f"continued behind line {self.behind}, which an earlier run reached: {self.state} says so, whatever --out "
                "is; --state names another file, with which all lines are read again, and are in the journal twice"
            )
        return "; ".join(parts)


@dataclass(frozen=True)
class ServedLine:
    """A line with those of its answers that are to be read, and the place behind it."""

    place: FilePosition
    answers: Sequence[ServedAnswer | UnreadAnswer]


def observe(options: ObserveOptions, transport: Transport, stop: Event | None = None) -> ObserveReport:
    """Read the answers of a file that no earlier run has read, until its end or until `stop` is set.

    Raises Unanswered if the server is away: what was not read is read by the next run.
    """
    if not transport.forces:
        raise ValueError(f"{transport.identity}: reading given answers needs a Helmsight server")
    with ExitStack() as opened:
        return Observing(options, transport, stop or Event(), opened).run()


class Observing:
    """A run, whose files are open as long as `opened` is."""

    def __init__(self, options: ObserveOptions, transport: Transport, stop: Event, opened: ExitStack) -> None:
        self.report = ObserveReport()
        self._options, self._transport = options, transport
        self._metrics = opened.enter_context(
            closing(ObservedMetrics(transport.registry, options.metrics_file, options.metrics_port))
        )
        self._requests = (
            None if options.requests is None else opened.enter_context(closing(RequestFile(options.requests)))
        )
        self._place = FilePosition.load(options.place, options.answers)
        self.report.behind, self.report.state = self._place.number, options.place
        tail = Tail(options.answers, self._place, follow=options.follow, stop=stop)
        self._tail = opened.enter_context(closing(tail))
        self._rows = (
            None if options.out is None else opened.enter_context(ResponseFile(options.out, again=lambda row: False))
        )
        self._pace = Pace(options.rate, sleep=stop.wait)
        self._saved = self._told = time.monotonic()
        self._taken = 0

    def run(self) -> ObserveReport:
        """Read all answers and return the numbers."""
        options = self._options
        at_once, total = options.at_once or self._transport.at_once, 0 if options.follow else self._tail.left()
        silent = options.quiet or options.follow
        try:
            with Tracker("Observed", {"": total}, unit="lines", quiet=silent) as progress:
                for entry, rows in in_order(self._entries(), self._read, at_once, self._pace):
                    self._keep(rows)
                    self._place = entry.place
                    progress.advance()
                    self._tell()
        finally:
            self._metrics.behind.set(self._tail.behind)
            self._place.save(options.place)
        return self.report

    def _entries(self) -> Iterator[ServedLine | None]:
        """Yield the lines with the answers that are to be read; None while there is no more."""
        for pair in self._tail.lines():
            self._tell()
            if pair is None:
                yield None
                continue
            if self._options.limit is not None and self._taken >= self._options.limit:
                return
            line, head = pair
            answers = [
                answer for answer in answers_in(line, self._options.paths, self._requests) if self._chosen(answer)
            ]
            self._taken += len(answers)
            yield ServedLine(FilePosition(line.number, line.end, head), answers)

    def _chosen(self, answer: ServedAnswer | UnreadAnswer) -> bool:
        """Return whether an answer is in the share that is read, which depends on its name alone."""
        name = f"{self._options.seed} {answer.name} {answer.choice}".encode("utf-8", "surrogatepass")
        chosen = int.from_bytes(hashlib.sha256(name).digest()[:8]) < self._options.share * 2**64
        self.report.left_out += not chosen
        return chosen

    def _read(self, entry: ServedLine) -> list[dict[str, Any]]:
        return [row for answer in entry.answers if (row := self._row(answer)) is not None]

    def _row(self, answer: ServedAnswer | UnreadAnswer) -> dict[str, Any] | None:
        """Return the row of an answer, which is forced for that; None if an earlier run has written it."""
        head = {"custom_id": answer.name, "choice": answer.choice}
        if isinstance(answer, UnreadAnswer):
            row_id = identity(answer.name, answer.choice, answer.outcome)
            row = {"id": row_id, **head, "outcome": answer.outcome, "reason": answer.reason}
            return None if self._rows is not None and row_id in self._rows.kept else row
        body = body_of(answer, self._transport.model, self._options.readouts)
        try:
            body = dict(with_pictures(body, self._options.pictures))
        except NoPicture as error:
            return self._row(UnreadAnswer(answer.name, answer.choice, "no_picture", str(error)))
        row_id = identity(self._transport.identity, answer.name, answer.choice, answer.answer_id, body)
        if self._rows is not None and row_id in self._rows.kept:
            return None
        answered = self._transport.send(body)
        if answered.problem is not None or answered.status in AWAY:
            raise Unanswered(f"{answered.reason} What was not read is read by the next run.")
        return {"id": row_id, **head, **reading(answer, answered)}

    def _keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self.report.count(row)
            self._metrics.count(row)
            if self._rows is not None:
                self._rows.write(row)

    def _tell(self) -> None:
        """Write what is written at intervals: the place, the metrics, and a line on a file that is followed."""
        now = time.monotonic()
        self._metrics.write()
        if now - self._saved >= SAVED:
            self._place.save(self._options.place)
            self._metrics.behind.set(self._tail.behind)
            self._saved = now
        if self._options.follow and not self._options.quiet and now - self._told >= EVERY:
            print(f"Observed: {self.report}", file=sys.stderr)
            self._told = now
