"""POST /v1/chat/completions: from the body to the engine and back, whole or streamed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flask import Blueprint, Response, g, request

import steering
from server.access.auth import caller
from server.api.body import read_json
from server.api.chats.again import Again, Checking
from server.api.chats.guarded import GuardedCompletion
from server.api.chats.running import Running, stream
from server.api.chats.waiting import deadline, decided, pictures_turn, took_longer
from server.context import AppContext, context
from server.dialects.answer import Answer
from server.dialects.chat import CHAT
from server.dialects.dialect import Begun, Dialect, Translation, place_of, renamed
from server.encode import json_response
from server.engine.runtime import Serving
from server.engine.served import ServedCompletion
from server.errors import ApiError, BadRequest, to_api_error
from server.http.streaming import RESUME
from server.http.watcher import client_socket
from server.images.load import ImageLoader
from server.journal.entry import Entry, Storing, guard_asked
from server.journal.words import LIVE, WORDED
from server.openapi.examples import of_chat
from server.openapi.operation import EVENTS, JSON, Parameter, documented
from server.requests.guarding import GuardPlan, alike
from server.requests.readiness import readouts_available
from server.requests.resolve import ignored_reasoning, resolve
from server.requests.skipping import Skipping
from server.telemetry.logs import COMPLETION, current_completion
from server.telemetry.metrics import Traffic
from server.wire.chat import ChatRequest
from server.wire.messages import image_urls
from server.wire.parse import read as parse_json
from server.wire.sent.answers import ChatCompletion, ChatCompletionChunk, ErrorBody
from steering.protocol.readout import REGISTRY

if TYPE_CHECKING:
    pass

blueprint = Blueprint("chat", __name__)

SOURCE = "X-Helmsight-Source"
"""The header that names the source of a request, one of `words.SOURCES`."""
TRACED = ("request_id", "trace_id", "span_id")
"""Notes of a request that its rows have, too."""


@blueprint.post("/v1/chat/completions")
@documented(
    "Chat",
    {200: {JSON: ChatCompletion, EVENTS: (ChatCompletionChunk, ErrorBody)}},
    errors=(400, 404, 413, 415, 429, 503, 504),
    parameters=[
        Parameter(
            SOURCE,
            "The source of the request, by which journal and metrics count its answers.",
            lambda: WORDED["source"].schema() | {"default": LIVE},
            place="header",
        )
    ],
    body={JSON: lambda app: app.chats},
    examples=of_chat,
)
def create_completion() -> Response:
    """Answer a chat, whole or as a stream of events.

    The schema of a stream is that of the data of each event; the last event is `[DONE]`.
    """
    return answered(CHAT)


def answered(dialect: Dialect) -> Response:
    """Answer the current request, a chat in a dialect, whole or as a stream of events."""
    app = context()
    serving = app.runtime.serving()
    with serving.engine.turn(caller().group) as turn:
        turn.check()  # before anything is read, since under overload refusing is most of the work
    body = parse_json(read_json(app))
    translated = dialect.translated(body)
    while True:
        try:
            running = begun(app, serving, dialect, body, translated)
            break
        except steering.ContextOverflow as error:
            if not translated.truncated():
                raise renamed(to_api_error(error), translated.places) from error
        except (ApiError, steering.RequestError) as error:
            problem = to_api_error(error)
            in_body = problem.param in translated.ignored  # and no place in the chat request
            raise problem if in_body else renamed(problem, translated.places) from error
    if not running.streamed:
        try:
            return json_response(running.whole())
        finally:
            running.close()
    response = Response(
        stream(running, request.environ.get(RESUME)),
        mimetype="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )
    # A generator that never started runs no `finally`, so that a client that left before the first byte needs this.
    response.call_on_close(running.close)
    return response


def begun(
    app: AppContext, serving: Serving, dialect: Dialect, body: dict[str, Any], translated: Translation
) -> Running:
    """Check and submit a chat request; raises BadRequest, and what `submit` raises."""
    bounds = serving.text_bounds(app.settings)
    parts = bounds.parts + app.settings.max_images
    chat, skipping = app.presets.read(translated.chat, app.chats, serving, parts, translated.ignored)
    bounds.check(chat.texts)
    unread = ignored_reasoning(chat, serving.capabilities)
    if unread and chat.strict:
        raise BadRequest(f"'{unread[0]}' has no place in the model's chat template, and 'strict' is true.", unread[0])
    if chat.store and not stores(app):
        if chat.strict:
            raise BadRequest(
                "'store' is not allowed on this server, and 'strict' is true.", "store", "unsupported_value"
            )
        unread.append("store")
    n = 1 if chat.n is None else chat.n
    answer = Answer.to(chat, chat.model or serving.name, serving.capabilities.fingerprint, dialect.prefix)
    storing = storing_of(app, chat, body, dialect)
    guard = None if chat.guard is None else GuardPlan.of(chat.guard, readouts_available(serving))
    more = frozenset[str]() if guard is None else guard.readouts
    fetched: dict[str, bytes] = {}
    retried = None
    if guard is not None:
        retried = again(app, serving, translated.chat, chat, more, app.image_loader(fetched), parts)
        skipping.skipped |= retried.skipped
    completion, entry, resolved = submit(
        app, serving, chat, answer.id, skipping, app.image_loader(fetched), storing, more, retried
    )
    late = None
    if guard is not None and retried is not None:
        hold = chat.guard_stream != "first" or not chat.stream
        same = alike(chat, resolved, retried.chat, retried.request)
        completion = GuardedCompletion(
            completion, resolved.sampling.seed, retried.request, guard, serving, caller().group, hold, n, same
        )
        late = partial(completion.end, took_longer(app))
    notes = {**skipping.notes, **cut(chat, completion)}
    ignored = [*skipping.ignored, *(place_of(path, translated.places) for path in unread)]
    answer = replace(answer, notes=notes, ignored=[*dict.fromkeys(ignored)])
    writer = dialect.writer(
        Begun(body, chat, answer, resolved.sampling, completion.prompt_tokens, completion.prompt_end,
              serving.capabilities.reasoning, storing is not None and entry is not None,
              lambda: completion.cached_tokens)
    )  # fmt: skip
    watch = app.watcher.add(client_socket(request.environ), deadline(app), completion.cancel, late)
    hidden = hidden_readouts(app, serving, resolved, more)
    return Running(
        app, completion, watch, g.started, n, answer.id, writer, bool(chat.stream), g.notes, entry, hidden,
        g.get("chat_span"), g.get("leave"), traffic=g.traffic, owner=caller().owner,
        places=translated.places,
    )  # fmt: skip


def submit(
    app: AppContext,
    serving: Serving,
    chat: ChatRequest,
    answer_id: str,
    skipping: Skipping,
    images: ImageLoader,
    storing: Storing | None = None,
    more: frozenset[str] = frozenset(),
    retried: Again | None = None,
) -> tuple[ServedCompletion, Entry | None, steering.Request]:
    """Submit the request to the engine; raises its errors, or Busy.

    Skipped parts are recorded in `skipping`, and `retried`, which a guard gives again, in the journal. Returns the
    completion, the writer of its journal rows, and the engine's request.
    """
    source = _source()
    earlier = earlier_of(app, chat)
    try:
        with serving.engine.turn(caller().group) as turn:
            turn.check()  # before loading images
            calibrated = turn.calibration
            images.fetch_remote(image_urls(chat.messages))  # a slow host must not hold a place for preparing

            def submitted(resolved: steering.Request) -> tuple[steering.Request, ServedCompletion]:
                def attempt(applicable: steering.Request) -> ServedCompletion:
                    return turn.submit(with_readouts(applicable, hidden_readouts(app, serving, applicable, more)))

                return skipping.until_it_applies(resolved, attempt)

            with pictures_turn(app, serving, chat, images) as images.check:
                resolved = resolve(chat, serving, app.settings, images, earlier, skipping)
                at_once = steering.next_prelude(resolved) is None
                if at_once:
                    resolved, completion = submitted(resolved)
            if not at_once:  # preludes take several engine steps, so that no place is held meanwhile
                resolved, completion = submitted(decided(app, turn, resolved, skipping))
    except steering.Fault:
        app.runtime.serving()  # raises a 503 rather than a 500 if the engine has stopped
        raise
    app.metrics.accepted(resolved)
    g.notes["interventions"] = sorted(resolved.asked)
    g.notes["completion_id"] = request.environ[COMPLETION] = answer_id
    current_completion.set((g.request_id, answer_id))
    if app.traces is not None and "span" in g:
        requested_model = chat.model or serving.name
        g.chat_span = app.traces.chat(g.span, resolved, requested_model, serving.name, answer_id, g.started)
        g.notes |= app.traces.ids(g.chat_span)
    g.traffic = Traffic.of(serving.name, resolved, source)
    digest = None if calibrated is None else calibrated.digest
    columns = {"key_name": caller().name, "source": source, "calibration": digest}
    columns |= {name: g.notes.get(name) for name in TRACED}
    asked = skipping.brief
    if chat.guard is not None and retried is not None:
        asked = asked | {"guard": guard_asked(chat.guard, retried.chat, app.journal.text_limit)}
    entry = Entry.of(
        app.journal, chat, resolved, answer_id, serving.name, completion.prompt_tokens, asked, columns, storing
    )
    g.leaves_rows = entry is not None
    return completion, entry, resolved


def storing_of(app: AppContext, chat: ChatRequest, body: dict[str, Any], dialect: Dialect) -> Storing | None:
    """Return how the answer is stored, None if it is not."""
    if not chat.store or not stores(app):
        return None
    if not dialect.keeps_images:
        return Storing(caller().owner)
    return Storing(caller().owner, app.pictures.keep, body.get("instructions") is not None, app.pictures.lock)


def _source() -> str:
    """Return the source of the current request, noted for the log; raises BadRequest for an unknown one."""
    source = request.headers.get(SOURCE, LIVE)
    try:
        WORDED["source"].check(SOURCE, source)
    except ValueError as error:
        raise BadRequest(str(error), SOURCE) from None
    g.notes["source"] = source
    return source


def stores(app: AppContext) -> bool:
    """Return whether completions can be stored."""
    return app.settings.store != "off" and app.journal.enabled


def cut(chat: ChatRequest, completion: ServedCompletion) -> dict[str, int]:
    """Return the answer's entry on `max_tokens` if fewer tokens fit than requested."""
    fits = completion.max_tokens
    return {} if chat.longest is None or chat.longest <= fits else {"max_tokens": fits}


def hidden_readouts(
    app: AppContext, serving: Serving, request: steering.Request, more: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the readouts that run for the journal, or as `more` for a guard, and are not shown."""
    return ((app.journal_readouts | more) & serving.capabilities.readouts) - shown_readouts(request)


def again(
    app: AppContext,
    serving: Serving,
    body: dict[str, Any],
    chat: ChatRequest,
    readouts: frozenset[str],
    images: ImageLoader,
    parts: int | None = None,
) -> Again:
    """Return the request that a chat's guard gives again; raises a 400 under the place of a wrong field of `then`."""
    assert chat.guard is not None
    images.fetch_remote(image_urls(chat.messages))

    def complete(request: steering.Request) -> steering.Request:
        return with_readouts(request, hidden_readouts(app, serving, request, readouts))

    checking = Checking(app, serving, app.chats, images, earlier_of(app, chat), parts, complete)
    return checking.again(body, chat.guard)


def earlier_of(app: AppContext, chat: ChatRequest) -> steering.Earlier | None:
    """Return the answer that drift is measured from; raises BadRequest for an unknown or forgotten one."""
    compared = chat.diagnostics.compare_to if chat.diagnostics else None
    return None if compared is None else app.states.find(compared)


def shown_readouts(request: steering.Request) -> frozenset[str]:
    """Return the keys of `diagnostics` that the client requested."""
    include = frozenset() if request.readouts is None else request.readouts.include
    return include.union(REGISTRY[name].part_of or name for name in include)


def with_readouts(request: steering.Request, more: frozenset[str]) -> steering.Request:
    """Return the request with further readouts."""
    if not more:
        return request
    diagnose = request.readouts
    include = more if diagnose is None else diagnose.include | more
    return replace(
        request, diagnose=steering.Diagnose(include) if diagnose is None else replace(diagnose, include=include)
    )
