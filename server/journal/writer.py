"""The journal of one server, which accepts rows without blocking and writes them in the background.

A row is on disk before its answer's last bytes are sent, so that a complete answer has its row even if the process is killed
then; but no answer waits longer for that than PATIENCE.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from sqlalchemy import Table, insert
from sqlalchemy.exc import DataError, IntegrityError, InterfaceError, StatementError

from server.journal.database import Database, Place, open_database
from server.journal.errors import REASONS, JournalError
from server.journal.reading.view import refresh
from server.journal.refusals import Refusals
from server.journal.retention import BATCH as PRUNED
from server.journal.retention import DAY, Clock, prune
from server.journal.schema import ADDED, ROWS, STORED

log = logging.getLogger("helmsight")

Row = dict[str, Any]
Entered = tuple[Table, Row]
State = Literal["ok", "failing", "off"]

QUEUED = 2000
"""Most rows that may wait to be written; further ones are dropped and counted."""
BATCH = 100
"""Most rows of one commit, which are those that arrived during the previous one."""
IDLE = 0.25
PATIENCE = 0.25
"""Most seconds that an answer waits for its row to be on disk before its last bytes are sent."""
READERS = 2.0
"""Most seconds that a reader of one answer waits for rows that were queued before."""
PRUNE_SECONDS = 60.0
HEAVY = 4
RETRY = (0.25, 10.0)
"""Seconds before the first and the last retries after an error."""

_LATER: dict[Table, Row] = {
    ROWS: {column.name: None for columns in ADDED.values() for column in columns},
    STORED: {},
}
_BAD_ROWS = (DataError, IntegrityError, InterfaceError, OverflowError)


class Journal:
    """A journal in the place `setting`: a path, a URL or "off".

    At most `max_rows` rows are kept, for at most `days` days, and up to `text_limit` characters each of prompts and answers,
    0 for none. A missing or broken database is retried for ever: `state` is "failing" meanwhile, and rows wait in the queue
    until it is full.
    """

    def __init__(
        self,
        setting: str,
        max_rows: int = 1_000_000,
        days: float = 30.0,
        text_limit: int = 0,
        queued: int = QUEUED,
        opener: Callable[[Place], Database] = open_database,
    ):
        self.enabled = setting.strip().lower() != "off"
        self.text_limit = text_limit
        self.written = 0
        self.dropped = 0
        self.problem: JournalError | None = None
        self.pruned: Callable[[], object] = lambda: None
        """Called after old rows were deleted, for what is kept beside them."""
        self.heavy = threading.BoundedSemaphore(HEAVY)
        """Acquired by readers of many rows, so that slow ones leave threads for chats."""
        self._setting = setting
        self._max_rows = max_rows
        self._days = days
        self._opener = opener
        self._queue: queue.Queue[Entered] = queue.Queue(queued)
        self._refusals = Refusals()
        self._batch: list[Entered] = []  # taken from the queue, not yet committed
        self._database: Database | None = None
        self._clock = Clock()
        self._next_prune = 0.0
        self._unpruned = 0
        self._refused = False
        self._lock = threading.Lock()
        self._settled = threading.Condition()
        self._taken = self._done = 0  # rows taken, and of those, in order, how many were committed or refused
        self._slow = False
        self._tried = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the journal and start to write, in the background."""
        if self.enabled and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="helmsight-journal", daemon=True)
            self._thread.start()

    @property
    def state(self) -> State:
        """The state of writing; "ok" also while the journal is being opened."""
        return "off" if not self.enabled else "ok" if self.problem is None else "failing"

    @property
    def waiting(self) -> int:
        """The number of rows that are not yet committed."""
        return self._queue.qsize() + len(self._batch)

    def status(self) -> dict[str, Any]:
        """Return the status for /ready: the state, rows written, dropped and waiting, and the error."""
        if not self.enabled:
            return {"state": "off"}
        problem = self.problem
        numbers = {"written": self.written, "dropped": self.dropped, "waiting": self.waiting}
        if problem is None:
            return {"state": "ok", **numbers}
        return {"state": "failing", **numbers, "reason": problem.reason, "error": REASONS[problem.reason]}

    def record(self, row: Row, table: Table = ROWS) -> int:
        """Queue a row and return at once, with a number for `settle`; a row without room is dropped and counted."""
        with self._settled:  # rows are numbered in the order of the queue
            try:
                self._queue.put_nowait((table, row))
                self._taken += 1
            except queue.Full:
                self._drop(1)
            return self._taken

    def refuse(self, status: int, code: str, route: str) -> None:
        """Count a refused request, which leaves no row; returns at once."""
        if self.enabled and not self._refusals.add(status, code, route):
            self._drop(1)

    def settle(self, number: int) -> bool:
        """Wait until that row and all before it are committed, for at most PATIENCE; returns whether they are.

        Does not wait for a broken journal, nor for one that failed to commit in time for an answer and has committed nothing
        since.
        """
        with self._settled:
            if self.problem is None and not self._slow and self._tried.is_set():
                self._settled.wait_for(lambda: self._done >= number or self.problem is not None, PATIENCE)
                self._slow = self._done < number
            return self._done >= number

    def settle_all(self) -> bool:
        """Wait until every row that was queued by now is committed, for readers, who wait longer than answers."""
        with self._settled:
            number = self._taken
            return self._settled.wait_for(lambda: self._done >= number or self.problem is not None, READERS)

    def refused(self, error: Exception) -> None:
        """Count an answer whose row could not be made or kept; the first one is logged."""
        if not self._refused:
            self._refused = True
            log.error("journal: an answer could not be recorded", exc_info=error)
        self._drop(1)

    def database(self) -> Database:
        """Return the open database, for readers; raises JournalError if there is none."""
        self._tried.wait(5.0)
        if self._database is None:
            raise self.problem or JournalError("starting")
        return self._database

    def close(self, seconds: float = 5.0) -> None:
        """Write pending rows, then stop; harmless if repeated."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _drop(self, count: int) -> None:
        with self._lock:
            self.dropped += count

    def _run(self) -> None:
        delay = RETRY[0]
        while True:
            stopping = self._stopping.is_set()
            if not self._batch:
                self._batch = self._take()
            if stopping and not self._batch and not self._refusals:
                break
            try:
                self._step()
                delay = RETRY[0]
            except Exception as error:
                self._failed(error)
                if stopping:
                    log.error("journal: %d rows could not be written before shutdown", self.waiting)
                    break
                self._stopping.wait(delay)
                delay = min(2 * delay, RETRY[1])
        if self._database is not None:
            self._database.close()

    def _take(self) -> list[Entered]:
        """Return the pending rows, up to BATCH; empty if none arrives within IDLE.

        Commits are not delayed, since answers wait for them; under load, rows gather during the previous commit.
        """
        rows: list[Entered] = []
        wait = not self._stopping.is_set()
        while len(rows) < BATCH:
            try:
                rows.append(self._queue.get(timeout=IDLE) if wait else self._queue.get_nowait())
            except queue.Empty:
                break
            wait = False
        return rows

    def _step(self) -> None:
        """Open the database if necessary, write the batch and empty it, prune if it is time."""
        if self._database is not None and self._database.moved():
            self._database.close()
            self._database = None
        if self._database is None:
            place = Place.of(self._setting)
            self._database = self._opener(place)
            refresh(self._database)
            log.info("journal: %s", place.shown)
        if self._batch:
            self._unpruned += len(self._batch)
            self._write(self._database, self._batch)
        if self._refusals.due or (self._refusals and self._stopping.is_set()):
            with self._database.writer.begin() as connection:
                self._refusals.write(connection)
            self._refusals.written()
        if time.monotonic() >= self._next_prune or self._unpruned > self._max_rows // 100 + BATCH:
            self._prune(self._database)
        if self.problem is not None:
            log.info("journal: writing again; %d rows were dropped so far", self.dropped)
        self.problem = None
        self._tried.set()

    def _write(self, database: Database, batch: list[Entered]) -> None:
        """Commit the rows; committed ones are removed from `batch`."""
        try:
            with database.writer.begin() as connection:
                for table in (ROWS, STORED):
                    # All rows of one statement need the same columns: the database would drop others silently.
                    if rows := [{**_LATER[table], **row} for into, row in batch if into is table]:
                        connection.execute(insert(table), rows)
            self._settle_first(batch, len(batch))
        except Exception as error:
            if not _is_of_rows(error):
                raise
            while batch:  # a row that the database refuses must not cost the others
                try:
                    with database.writer.begin() as connection:
                        connection.execute(insert(batch[0][0]), batch[0][1])
                except Exception as inner:
                    if not _is_of_rows(inner):
                        raise
                    self._settle_first(batch, 1, committed=False)
                    self.refused(inner)
                else:
                    self._settle_first(batch, 1)

    def _settle_first(self, batch: list[Entered], count: int, committed: bool = True) -> None:
        """Remove the first rows, which are finished, from the batch, and wake the answers that wait for them."""
        with self._settled:
            if committed:
                self.written += sum(table is ROWS for table, _ in batch[:count])
            del batch[:count]
            self._done += count
            self._slow = False
            self._settled.notify_all()

    def _prune(self, database: Database) -> None:
        with database.writer.begin() as connection:
            deleted = prune(connection, self._max_rows, self._clock.now() - self._days * DAY)
        self.pruned()
        if deleted < PRUNED:  # otherwise pruning continues after the next rows
            self._next_prune = time.monotonic() + PRUNE_SECONDS
            self._unpruned = 0

    def _failed(self, error: Exception) -> None:
        """Store the error, and log it once."""
        if isinstance(error, JournalError):
            problem = error
        elif self._database is not None:
            problem = self._database.explain(error)
        else:
            problem = JournalError("failed", type(error).__name__)
        if self.problem is None or self.problem.reason != problem.reason:
            log.error("journal: %s; the server continues, and rows wait or are dropped", problem)
        with self._settled:
            self.problem = problem
            self._settled.notify_all()
        self._tried.set()


def _is_of_rows(error: Exception) -> bool:
    """Return whether an error is due to a row's values rather than to the database."""
    return isinstance(error, _BAD_ROWS) or type(error) is StatementError
