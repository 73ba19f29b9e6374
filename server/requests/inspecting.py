"""Inspection: the checks of a resolved request that an engine makes before it answers, without an answer."""

from __future__ import annotations

from collections.abc import Callable

import steering
from server.engine.runtime import Serving
from server.engine.served import Inspected
from server.requests.skipping import Skipping


def inspected(
    request: steering.Request,
    serving: Serving,
    skipping: Skipping,
    images: int,
    complete: Callable[[steering.Request], steering.Request] = lambda request: request,
) -> tuple[steering.Request, Inspected]:
    """Return a request without its inapplicable parts, and its sizes; raises RequestError for an invalid one.

    `images` is the number of its images; `complete` returns what would be submitted for it.
    """
    check_auto(request, serving, skipping, images)
    return skipping.until_it_applies(request, lambda applicable: serving.engine.inspect(complete(applicable)))


def check_auto(request: steering.Request, serving: Serving, skipping: Skipping, images: int | None) -> None:
    """Raise what an automatic direction would raise after it was found; `images` is None without a prompt."""
    auto = request.asked.get(name := steering.Steering.name())
    if isinstance(auto, steering.Auto):
        with skipping.of(name):
            serving.engine.check_auto(auto)
            serving.engine.check_steer(auto.stated("vision"), images)
