"""A completion that is being sent to one client: its counts, its journal rows, its end, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import steering
from server.api.chats.guarded import GuardedCompletion
from server.api.chats.waiting import CLIENT_GONE, check_watch
from server.context import AppContext
from server.dialects.dialect import Writer, renamed
from server.engine.served import ServedCompletion
from server.errors import to_api_error
from server.http.streaming import AWAITED, BLOCKING
from server.http.watcher import Watch
from server.journal.entry import Entry
from server.telemetry.metrics import Traffic

if TYPE_CHECKING:
    from opentelemetry.trace import Span


@dataclass
class Running:
    """A completion that is being sent to one client.

    `n` is its number of choices, `unfinished` holds those that have not ended; `entry` writes the journal, None if there is
    none; `notes` are for the log, `span` for traces; `hidden` are readouts that the client does not receive; `owner`
    marks the key, and `leave` releases its place.
    """

    app: AppContext
    completion: ServedCompletion
    watch: Watch
    started: float
    n: int
    answer_id: str
    writer: Writer
    streamed: bool
    notes: dict[str, Any]
    entry: Entry | None = None
    hidden: frozenset[str] = frozenset()
    span: Span | None = None
    leave: Callable[[], object] | None = None
    first_token: float | None = None
    broken: Literal["cancelled", "error", "shutdown"] = "cancelled"
    """The outcome that the journal records for unfinished choices."""
    _: KW_ONLY
    owner: str = ""
    traffic: Traffic
    """The labels of its metrics."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The body's places, as errors name them, for those in the chat request that have another name."""

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.n))
        self._shown: dict[int, steering.Choice] = {}
        self._closed = False

    def chunks(self, source: Iterable[steering.Chunk | None]) -> Iterator[steering.Chunk | None]:
        """Yield the engine's chunks and count them; raises if the answer was given up."""
        try:
            for chunk in source:
                yield None if chunk is None else self.counted(chunk)
            if self.unfinished:
                raise steering.Fault("The generation was cancelled.")
        except Exception as error:
            if self.watch.outcome is None:
                self.broken = "shutdown" if self.app.runtime.state == "draining" else "error"
            if isinstance(error, steering.SteeringError):
                self.check()
            if isinstance(error, steering.RequestError):  # such as of a grammar, while it is followed
                raise renamed(to_api_error(error), self.places) from error
            raise

    def counted(self, chunk: steering.Chunk) -> steering.Chunk:
        """Record a chunk in metrics and journal; return the chunk that the client receives."""
        self._time_first_token()
        if chunk.choice is None:
            return chunk
        kept = self.completion.kept(chunk.choice.index) if isinstance(self.completion, GuardedCompletion) else None
        kinds, traffic = self.notes["interventions"], self.traffic
        if kept is not None:  # another request's answer than the one that was accepted
            kinds, traffic = sorted(kept.request.asked), Traffic.of(traffic.model, kept.request, traffic.source)
        self.app.metrics.finished(chunk.choice, kinds, traffic)
        if chunk.choice.guard is not None:
            self.app.metrics.guarded(chunk.choice.guard)
        if self.app.traces is not None and self.span is not None:
            self.app.traces.answered(self.span, chunk.choice, self.answer_id)
            self.notes.setdefault("finish_reasons", []).append(chunk.choice.finish_reason)
        self.unfinished.discard(chunk.choice.index)
        self.app.states.keep(self.answer_id, chunk.choice)
        sent = self.app.files.apart(self.shown(chunk.choice), self.answer_id, self.owner)
        self._shown[sent.index] = sent
        if self.entry is not None:
            given = None if kept is None else (kept.request, kept.prompt_tokens)
            self.entry.finished(chunk.choice, self.first_token, time.monotonic() - self.started, given)
        return replace(chunk, choice=sent)

    def result(self) -> steering.Result:
        """Return the result of the ended request as the client gets it."""
        return replace(self.completion.result(), choices=tuple(self._shown[index] for index in sorted(self._shown)))

    def _time_first_token(self) -> None:
        if self.first_token is None and (at := self.completion.first_at) is not None:
            self.first_token = at - self.started
            self.app.metrics.first_token.observe(self.first_token)

    def shown(self, choice: steering.Choice) -> steering.Choice:
        """Return a choice without hidden readouts."""
        if choice.diagnostics is None or not self.hidden:
            return choice
        shown = {name: value for name, value in choice.diagnostics.items() if name not in self.hidden}
        baseline = None if choice.baseline is None else self.shown(choice.baseline)
        return replace(choice, diagnostics=shown, baseline=baseline)

    def check(self) -> None:
        """Raise if the answer was given up: its client left, it took too long, or the server shuts down."""
        check_watch(self.app, self.watch)
        self.app.runtime.serving()

    def whole(self) -> dict[str, Any]:
        """Wait for the whole answer and return it."""
        for _ in self.chunks(self.completion.whole()):
            pass
        self.settle()
        return self.writer.whole(self.result())

    def settle(self) -> None:
        """Store a finished answer, and write its rows to disk, before its client learns of the end."""
        if self.entry is not None:
            if not self.unfinished:
                self._store()
            self.entry.settle()

    def _store(self) -> None:
        """Store the finished answer, once, where its client asked for that."""
        if self.entry is not None and self.entry.stored is not None:
            self.entry.store(self.writer.whole(self.result()))

    def close(self) -> None:
        """Stop watching and cancel what still runs; harmless if repeated.

        Called before the client learns of the end, so that its next request finds every resource released.
        """
        if self._closed:
            return
        self._closed = True
        if self.leave is not None:
            self.leave()
        self.app.watcher.remove(self.watch)
        self.completion.cancel()
        if self.unfinished and self.broken == "cancelled" and self.watch.outcome is None:
            self.watch.outcome = "gone"  # a write noticed it before the watcher did
        if self.watch.outcome == "gone":
            self.notes["error"] = CLIENT_GONE
        generated = sum(map(self.completion.generated, range(self.n)))
        self.notes |= {"prompt_tokens": self.completion.prompt_tokens, "completion_tokens": generated}
        self._time_first_token()
        if self.entry is not None:
            total, completion = time.monotonic() - self.started, self.completion
            if not self.unfinished:  # its client may have left just before the end
                self._store()
            for index in sorted(self.unfinished):
                tokens, text = completion.generated(index), completion.text_of(index)
                self.entry.given_up(index, self.broken, tokens, text, self.first_token, total)
            self.entry = None
        answered = self.watch.outcome == "late" and not self.unfinished  # a guard kept its first answer
        if self.watch.outcome and not answered:
            self.app.metrics.disconnects.labels(self.watch.outcome).inc()


def stream(running: Running, resume: Callable[[], object] | None) -> Iterator[bytes]:
    """Yield server-sent events; an error after the start becomes an event.

    With `resume`, yields a pause instead of blocking.
    """
    writer = running.writer
    try:
        yield writer.begin().encode()
        for chunk in running.chunks(running.completion if resume is None else running.completion.paused(resume)):
            if chunk is None:
                yield AWAITED
                continue
            if chunk.choice is not None:
                if resume is not None and running.entry is not None:
                    yield BLOCKING
                running.settle()
            if events := writer.piece(chunk, last=not running.unfinished):
                yield events.encode()
        end = writer.end(running.result)
        running.close()
        yield end.encode()
    except Exception as error:  # the status is already sent, so that any error becomes an event
        problem = to_api_error(error)
        running.notes["error"] = problem.code
        running.close()
        yield writer.failed(problem).encode()
    finally:
        running.close()
