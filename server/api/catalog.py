"""The routes that list the model with its limits and, from `server.vectors`, the steering vectors."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from flask import Blueprint, Response

from server.access.auth import CHATS
from server.api import vectors as vector_routes
from server.api.vectors import vector_or_error
from server.context import AppContext, context
from server.encode import json_response
from server.engine.runtime import Serving
from server.engine.served import Capabilities
from server.images.load import MAX_RATIO, MAX_SIDE
from server.openapi.operation import JSON, Parameter, documented
from server.requests.guarding import guard_card
from server.requests.preset import AT, PLAIN, Preset
from server.requests.readiness import readouts_available, states
from server.wire.interventions import schema as options_schema
from server.wire.sent.catalog import ModelCard, ModelList, PresetCard
from steering.protocol import intervention, readout
from steering.protocol.intervention_spec import Options, vector_fields
from steering.protocol.readout import Readout
from steering.readiness import PartState, lacking

SCALARS = {float: "number", int: "integer", bool: "boolean"}
"""JSON schema types of the numbers that readouts keep."""

blueprint = Blueprint("catalog", __name__)
blueprint.register_blueprint(vector_routes.blueprint)


@blueprint.get("/v1/models")
@documented("Models", ModelList, errors=(503,))
def list_models() -> Response:
    """List the model of this server, followed by its presets as models of their own."""
    app = context()
    serving = app.runtime.serving()
    presets = [_preset(app, serving, preset) for preset in app.presets.at(serving).values()]
    return json_response({"object": "list", "data": [_model(app, serving), *presets]})


@blueprint.get("/v1/models/<path:name>")
@documented(
    "Models",
    {200: {JSON: (ModelCard, PresetCard)}},
    errors=(404, 503),
    parameters=[Parameter("name", "The listed name; it may contain slashes.", example="helmsight-demo", place="path")],
)
def get_model(name: str) -> Response:
    """Return the model, or one of its presets, by name."""
    app = context()
    serving = app.runtime.serving()
    preset = app.presets.find(serving, name)
    return json_response(_model(app, serving) if preset is PLAIN else _preset(app, serving, preset))


def _preset(app: AppContext, serving: Serving, preset: Preset) -> dict[str, Any]:
    """Return a preset; `root` and `parent` name its model, as in other servers' lists."""
    return {
        "id": f"{serving.name}{AT}{preset.name}",
        "object": "model",
        "created": serving.since,
        "owned_by": "helmsight",
        "root": serving.name,
        "parent": serving.name,
        "preset": preset.name,
        "fields": preset.fields,
        "lacks": lacking(app.presets.interventions(preset), states(serving)),
        "origin": "built-in" if preset.source is None else "settings",
    }


def _model(app: AppContext, serving: Serving) -> dict[str, Any]:
    capabilities, settings, stats = serving.capabilities, app.settings, serving.engine.stats()
    bounds, available = serving.text_bounds(settings), readouts_available(serving)
    matching = [v["name"] for name in serving.store.names() if (v := vector_or_error(serving, name)).get("matches")]
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.since,
        "owned_by": "helmsight",
        "endpoints": list(CHATS),
        "fingerprint": capabilities.fingerprint,
        "layers": capabilities.layers,
        "hidden_size": capabilities.hidden_size,
        "context_length": capabilities.context_length,
        "device": capabilities.device,
        "dtype": capabilities.dtype,
        "quantization": capabilities.quantization,
        "engine": capabilities.engine,
        "unsupported": _unsupported(capabilities),
        "compiled": stats.get("compiled_in_use", 0) > 0,
        "image_size": None if capabilities.image_size is None else list(capabilities.image_size),
        "image_pixels": None if capabilities.pixels is None else list(capabilities.pixels),
        "chat_template_kwargs": sorted(capabilities.template_variables),
        "vectors": matching,
        "interventions": _interventions(capabilities),
        "readouts": [entry.name for entry in _readouts(capabilities)],
        "readout_schemas": [_described(entry, available[entry.name]) for entry in _readouts(capabilities)],
        "guard": guard_card(capabilities.readouts, available, app.chats),
        "prepared": [_prepared(state) for state in states(serving)],
        "limits": {
            "slots": int(stats["slots"]),
            "waiting": int(stats["max_waiting"]),
            "choices": settings.max_choices,
            "characters": bounds.characters,
            "texts": bounds.parts,
            "images": settings.max_images,
            "image_bytes": settings.max_image_bytes,
            "image_pixels": settings.max_image_pixels,
            "image_side": MAX_SIDE,
            "image_ratio": MAX_RATIO,
            "request_pixels": settings.max_request_pixels,
            "body_bytes": settings.max_body,
            "strength": settings.max_strength,
            "strength_unit": "published",
            "vectors": settings.max_vectors,
            "seconds": settings.request_timeout,
            "remote_images": settings.allow_remote_images,
            "uploads": settings.allow_uploads,
            "vector_bytes": settings.max_vector_bytes,
            "uploaded_vectors": settings.max_uploaded_vectors,
        },
    }


def _interventions(capabilities: Capabilities) -> list[dict[str, Any]]:
    """Return the available interventions with the JSON schemas of their options."""
    return [
        {
            "name": name,
            "path": list(kind.path),
            "kind": kind.kind or None,
            "twin": kind.twin,  # a request may have only one of these
            "vectors": issubclass(kind, Options) and bool(vector_fields(kind)),
            "schema": schema,
        }
        for name, (kind, _) in intervention.REGISTRY.items()
        if name in capabilities.interventions and (schema := options_schema(kind, capabilities.layers)) is not None
    ]


def _unsupported(capabilities: Capabilities) -> list[str]:
    """Return the fields of interventions and readouts that this version has, but not the engine."""
    names = [name for name in intervention.REGISTRY if name not in capabilities.interventions]
    return [*names, *(f"diagnostics.{name}" for name in readout.REGISTRY if name not in capabilities.readouts)]


def _readouts(capabilities: Capabilities) -> list[Readout]:
    return [entry for name, entry in readout.REGISTRY.items() if name in capabilities.readouts]


def _prepared(state: PartState) -> dict[str, Any]:
    """Return a part that is measured once for a model, with what lacks without it."""
    part = state.part
    return {
        "part": part.name,
        "there": state.there,
        "serves": part.serves,
        "without": part.without,
        "command": part.command,
    }


def _described(entry: Readout, available: bool) -> dict[str, Any]:
    """Return a readout with the numbers that journal and metrics keep of it."""
    scalars = {name: SCALARS[kind] for name, kind in entry.scalars.items()}
    quantities = {name: asdict(quantity) for name, quantity in entry.quantities.items()}
    own_key = entry.part_of is None
    return {
        "name": entry.name,
        "available": available,
        "cheap": entry.cheap,
        "own_key": own_key,
        "scalars": scalars,
        "quantities": quantities,
    }
