"""Waiting for what a request needs before its answer can begin: its images, its preludes, and its client's patience."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flask import g, request

import steering
from server.access.auth import caller
from server.context import AppContext
from server.engine.runtime import Serving
from server.engine.served import ServedCompletion, ServedTurn
from server.errors import CLIENT_CLOSED, ApiError
from server.http.watcher import Watch, client_socket
from server.images.load import ImageLoader
from server.requests.skipping import Skipping
from server.wire.chat import ChatRequest
from server.wire.messages import image_urls

CLIENT_GONE = "client_closed"


@contextmanager
def watched(app: AppContext, give_up: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Call `give_up` if the client leaves or the deadline passes within the block.

    Used before a completion exists that would be cancelled instead. Yields a function that raises once that has happened.
    """
    with app.watcher.watching(client_socket(request.environ), deadline(app), give_up) as watch:

        def check() -> None:
            if watch.outcome:
                app.metrics.disconnects.labels(watch.outcome).inc()
            check_watch(app, watch)
            app.runtime.serving()  # a draining server refuses what is not submitted yet

        yield check


@contextmanager
def pictures_turn(
    app: AppContext, serving: Serving, chat: ChatRequest, images: ImageLoader
) -> Iterator[Callable[[], object]]:
    """Hold a place among those that prepare images, if the chat has any.

    Yields a function that raises once nobody waits for the answer.
    """
    if not any(image_urls(chat.messages)):
        yield lambda: None
        return
    large = images.are_large(image_urls(chat.messages))
    with watched(app, lambda: None) as check, serving.pictures.turn(caller().group, check, large):
        yield check


def decided(app: AppContext, turn: ServedTurn, undecided: steering.Request, skipping: Skipping) -> steering.Request:
    """Run the request's preludes and return it with their results, without those that do not apply.

    They are cancelled if the client leaves.
    """
    while (prelude := steering.next_prelude(undecided)) is not None:
        without, measuring = steering.in_place_of(undecided, prelude), Measuring()
        with skipping.of(".".join(prelude.path)), watched(app, measuring.cancel) as check:
            try:
                without = turn.decide(undecided, measuring.begun)
            except steering.Fault:
                check()
                raise
        undecided = without
    return undecided


def deadline(app: AppContext) -> float:
    """Return the request's deadline on the monotonic clock, counted from its arrival."""
    return float(g.started + app.settings.request_timeout)


class Measuring:
    """Completions that run before a request is answered, to be cancelled together."""

    def __init__(self) -> None:
        self._running: list[ServedCompletion] = []
        self._cancelled = False

    def begun(self, completion: ServedCompletion) -> None:
        self._running.append(completion)
        if self._cancelled:
            completion.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        for completion in list(self._running):
            completion.cancel()


def check_watch(app: AppContext, watch: Watch) -> None:
    """Raise if a request was given up because its client left or it took too long."""
    if watch.outcome == "gone":
        raise ApiError(CLIENT_CLOSED, "The client closed the connection.", code=CLIENT_GONE)
    if watch.outcome == "late":
        raise ApiError(504, took_longer(app), code="request_timeout")


def took_longer(app: AppContext) -> str:
    """Return the sentence about a request whose deadline passed."""
    return f"The answer took longer than {app.settings.request_timeout:g} seconds."
