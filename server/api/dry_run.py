"""Dry runs: reports of what a chat request asks for and of what would be applied, without an answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from PIL import Image

import steering
from server.api.chats.again import Checking
from server.api.chats.waiting import pictures_turn
from server.context import AppContext
from server.dialects.answer import ignoring
from server.engine.runtime import Serving
from server.images.load import ImageLoader, is_remote
from server.requests.guarding import GuardPlan
from server.requests.inspecting import check_auto, inspected
from server.requests.readiness import readouts_available
from server.requests.resolve import resolve
from server.wire.messages import image_urls
from server.wire.parse import read
from steering.protocol.intervention import by_path
from steering.protocol.readout import readout_options

STAND_IN = (224, 224)
"""Width and height of the gray picture in place of one that would have to be fetched."""


def validate(body: bytes, serving: Serving, app: AppContext) -> dict[str, Any]:
    """Return the report on a JSON body; raises the errors of a chat request, with its codes and params.

    With messages the whole request is prepared, as a chat's is. Without them only what does not depend on a prompt can be
    checked.
    """
    bounds = serving.text_bounds(app.settings)
    parts, fields = bounds.parts + app.settings.max_images, read(body)
    chat, skipping = app.presets.read(fields, app.dry_runs, serving, parts)
    bounds.check(chat.texts)
    compared = chat.diagnostics.compare_to if chat.diagnostics else None
    earlier = None if compared is None else app.states.find(compared)
    urls = [url for url, _ in image_urls(chat.messages)]
    images, sizes = StandIns(app.settings, decoded=app.decoded), None
    images.check_number(len(urls))
    if chat.guard is not None:
        GuardPlan.of(chat.guard, readouts_available(serving))
        others = StandIns(app.settings, decoded=app.decoded)
        checking = Checking(app, serving, app.dry_runs, others, earlier, parts)
        skipping.skipped |= checking.again(fields, chat.guard).skipped
    if chat.messages:
        with pictures_turn(app, serving, chat, images) as images.check:
            resolved = resolve(chat, serving, app.settings, images, earlier, skipping)
            resolved, sizes = inspected(resolved, serving, skipping, len(urls))
    else:
        chat = chat.model_copy(update={"continue_final_message": None})  # there is nothing to continue
        resolved = resolve(chat, serving, app.settings, images, earlier, skipping)
        check_auto(resolved, serving, skipping, None)
    name = steering.Steering.name()
    steered = None if skipping.skips(name) else resolved.asked.get(name)
    return {
        "object": "steering.validation",
        "model": chat.model or serving.name,
        "steering": steers_of(steered, None if sizes is None else bool(urls)),
        "interventions": interventions_of(resolved),
        "diagnostics": readouts_of(resolved),
        "baseline": resolved.baseline,
        "n": resolved.n,
        "force": chat.force is not None,
        "grammar": resolved.grammar is not None,
        "tools": [] if resolved.tools is None else sorted(resolved.tools.names),
        "sampling": asdict(resolved.sampling),
        "prompt_tokens": None if sizes is None or any(map(is_remote, urls)) else sizes.prompt_tokens,
        "max_tokens": None if sizes is None else sizes.max_tokens,
        **skipping.notes,
        **ignoring(skipping.ignored),
    }


class StandIns(ImageLoader):
    """A loader that fetches nothing: a gray picture stands for each remote one that a chat would fetch."""

    def load(self, url: str, param: str) -> Image.Image:
        if not is_remote(url) or not self.settings.allow_remote_images:
            return super().load(url, param)
        self.check()
        self.count_image()
        return Image.new("RGB", STAND_IN, "gray")


def steers_of(spec: steering.InterventionSpec | None, pictured: bool | None) -> list[dict[str, Any]]:
    """Return the planned effect of each steering vector; the direction, and so the sign, of `auto` is still open.

    `pictured` tells whether the request has an image, None if that is not known.
    """
    if isinstance(spec, steering.Auto):
        return [{**steering.planned(spec.stated("vision"), pictured), "toward": "auto", "scale": None}]
    steers = spec.steers if isinstance(spec, steering.Steering) else ()
    return [steering.planned(steer, pictured) for steer in steers]


def interventions_of(request: steering.Request) -> dict[str, Any]:
    """Return the settings of the interventions other than steering, arranged as `applied` is."""
    others = {name: spec for name, spec in request.asked.items() if isinstance(spec, steering.Options)}
    return by_path(others, lambda name, spec: spec.settings() if isinstance(spec, steering.Options) else None)


def readouts_of(request: steering.Request) -> dict[str, Any] | None:
    """Return the readouts with those of their options that are set; None without readouts."""
    diagnose = request.readouts
    if diagnose is None:
        return None
    options = {name: (option, option.wire(diagnose)) for name, option in readout_options().items() if option.written}
    set_options = {name: value for name, (option, value) in options.items() if value != option.at_rest}
    return {"include": sorted(readout.name for readout in diagnose.readouts), **set_options}
