"""A dry run: what the steering of a chat request would do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

from pydantic import Field

import steering
from server import wire
from server.context import AppContext
from server.resolve import automatic, entry, resolve
from server.runtime import Serving


class Validation(wire.ChatRequest):
    """A chat request whose messages may be missing; where they are there, the numbers of images are checked too."""

    steering: wire.SteeringField
    messages: Annotated[list[wire.Message], Field(default_factory=list, max_length=wire.MAX_MESSAGES)]


def validate(body: bytes, serving: Serving, app: AppContext) -> dict[str, Any]:
    """The report of a JSON body; raises the errors of a chat request, with its codes and params."""
    asked = wire.parse(body, Validation)
    if asked.model:
        serving.check_name(asked.model)
    images = len(list(wire.image_urls(asked))) if asked.messages else None
    asked = asked.model_copy(update={"messages": []})  # pictures are not fetched for a dry run
    found = resolve(asked, serving, app.settings, app.image_loader()).asked.get(steering.Steering.name())
    steers = found.steers if isinstance(found, steering.Steering) else ()
    auto = automatic(asked.steering, serving, app.settings)
    if auto is not None:
        steering.check_auto(serving.mllm, auto)
        steers = (auto.toward("vision"),)
    listed = asked.steering is not None and asked.steering.vectors is not None
    for i, steer in enumerate(steers):
        with entry(i) if listed else nullcontext():
            steering.check_steer(serving.mllm, steer, images)
    reports = [steering.planned(steer) for steer in steers]
    if auto is not None:  # the way, and with it the sign, is found when the answer is asked for
        reports = [{**report, "toward": "auto", "scale": None} for report in reports]
    return {"object": "steering.validation", "model": serving.name, "steering": reports}
