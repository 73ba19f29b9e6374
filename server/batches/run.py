"""A batch: every request of a file under each condition, answered and written as it comes, resumed where it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probes.answering.progress import Tracker
from probes.harness.options import check_file
from server.batches.conditions import ASKED, BatchCondition, read_conditions
from server.batches.file import BatchResponse, Problem, ResponseFile, identity, requests_in, row
from server.batches.flat import check_table, write_table
from server.batches.pictures import NoPicture, with_pictures
from server.batches.pool import Pace, in_order
from server.batches.transport import Transport


@dataclass(frozen=True)
class BatchOptions:
    """The files of a batch, and how it is run.

    `pictures` is the folder of pictures that requests name as files. `at_once` and `rate` (requests a second) bound the
    load; `any_model` answers requests for whatever model; `replace` drops responses to anything else.
    """

    requests: Path
    responses: Path
    conditions: Path | None = None
    table: Path | None = None
    pictures: Path | None = None
    at_once: int | None = None
    rate: float | None = None
    any_model: bool = False
    replace: bool = False
    quiet: bool = False

    def check(self) -> None:
        """Raise ValueError or OSError for files that cannot be used, before a model is loaded."""
        self.requests.open("rb").close()
        if self.conditions is not None:
            read_conditions(self.conditions, (), "")
        if self.table is not None:
            check_table(self.table)
        places = [path.absolute() for path in (self.requests, self.responses, self.table) if path is not None]
        if len(set(places)) < len(places):
            raise ValueError("the files of requests, of responses and of the table must be different ones")
        for path in (self.responses, self.table):
            if path is not None:
                check_file(path)


@dataclass
class BatchSummary:
    """The numbers of answers and failures of a batch; `reason` is that of its first failure."""

    answered: int = 0
    failed: int = 0
    kept: int = 0
    reason: str | None = None

    def count(self, answered: BatchResponse) -> None:
        """Count a response."""
        self.answered += answered.ok
        self.failed += not answered.ok
        self.reason = self.reason or answered.reason


@dataclass(frozen=True)
class BatchTask:
    """A request under a condition, with the id of the row that answers it."""

    row_id: str
    custom_id: str
    condition: BatchCondition
    body: Mapping[str, Any]
    problem: Problem | None


def run_batch(options: BatchOptions, transport: Transport) -> BatchSummary:
    """Answer every request that has no answer yet, and write the table if there is to be one."""
    conditions = _conditions(options, transport)
    parts = dict.fromkeys((condition.name or "" for condition in conditions), 0)
    row_conditions: dict[str, str] = {}
    for task in _tasks(options, conditions, transport):
        row_conditions[task.row_id] = task.condition.name or ""
        parts[task.condition.name or ""] += 1
    summary = BatchSummary()

    def ask(task: BatchTask) -> BatchResponse:
        return BatchResponse(problem=task.problem) if task.problem is not None else transport.send(task.body)

    with (
        ResponseFile(
            options.responses, row_conditions, replace=options.replace, outdated=transport.digests().difference
        ) as rows,
        Tracker("Batch", parts, quiet=options.quiet) as progress,
    ):
        summary.kept = len(rows.kept)
        for row_id in rows.kept:
            progress.advance(row_conditions[row_id], kept=True)
        unanswered = (task for task in _tasks(options, conditions, transport) if task.row_id not in rows.kept)
        for task, answered in in_order(unanswered, ask, options.at_once or transport.at_once, Pace(options.rate)):
            name = task.condition.name
            rows.write(row(task.row_id, task.custom_id, answered, **({} if name is None else {"condition": name})))
            summary.count(answered)
            progress.advance(name or "")
    if options.table is not None:
        write_table(options.requests, options.responses, options.table)
    return summary


def _conditions(options: BatchOptions, transport: Transport) -> Sequence[BatchCondition]:
    if options.conditions is None:
        return ASKED
    return read_conditions(options.conditions, transport.models, transport.model)


def _tasks(options: BatchOptions, conditions: Sequence[BatchCondition], transport: Transport) -> Iterator[BatchTask]:
    """Yield the requests in order, each under all conditions, which share its images and its prompt's cached prefix."""
    for request in requests_in(options.requests):
        request_body, problem = request.body, request.problem
        try:
            request_body = with_pictures(request_body, options.pictures)
        except NoPicture as error:
            problem = Problem("invalid_image_url", str(error))
        for condition in conditions:
            body = {} if problem else condition.body(request_body, transport.model, options.any_model)
            row_id = identity(transport.identity, request.custom_id, condition.name, body)
            yield BatchTask(row_id, request.custom_id, condition, body, problem)
