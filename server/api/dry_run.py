"""Dry runs: reports of what the steering of a chat request would do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import steering
from server.context import AppContext
from server.dialects.answer import ignoring
from server.engine.runtime import Serving
from server.requests.resolve import resolve
from server.requests.steers import entry
from server.wire.messages import image_urls
from server.wire.parse import read
from server.wire.steering import SteeringForm as NamedSteering


def validate(body: bytes, serving: Serving, app: AppContext) -> dict[str, Any]:
    """Return the report on a JSON body; raises the errors of a chat request, with its codes and params."""
    chat, skipping = app.presets.read(read(body), app.dry_runs, serving)
    images = len(list(image_urls(chat.messages))) if chat.messages else None
    # A dry run fetches no images; without messages there is nothing to continue either.
    chat = chat.model_copy(update={"messages": [], "continue_final_message": None})
    resolved = resolve(chat, serving, app.settings, app.image_loader(), skipping=skipping)
    intervention = resolved.asked.get(name := steering.Steering.name())
    steers = intervention.steers if isinstance(intervention, steering.Steering) else ()
    auto = intervention if isinstance(intervention, steering.Auto) else None
    if auto is not None:
        with skipping.of(name):
            serving.engine.check_auto(auto)
            steers = (auto.stated("vision"),)
    forms = [given.form for given in chat.interventions.values()]
    listed = any(isinstance(form, NamedSteering) and form.vectors is not None for form in forms)
    for i, steer in enumerate(steers):
        with skipping.of(name), entry(i) if listed else nullcontext():
            serving.engine.check_steer(steer, images)
    reports = [] if skipping.skips(name) else [steering.planned(steer) for steer in steers]
    if auto is not None:  # the direction, and with it the sign, is only decided with an answer
        reports = [{**report, "toward": "auto", "scale": None} for report in reports]
    model = chat.model or serving.name
    return {
        "object": "steering.validation",
        "model": model,
        "steering": reports,
        **skipping.notes,
        **ignoring(skipping.ignored),
    }
