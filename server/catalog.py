"""What there is: the model with its limits, and the steering vectors."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response

from server.context import AppContext, context
from server.encode import dumps
from server.errors import ApiError
from server.runtime import Serving
from steering import READOUTS, SteeringVector, VectorError

blueprint = Blueprint("catalog", __name__)


@blueprint.get("/v1/models")
def list_models() -> Response:
    """The one model of this server in OpenAI's list."""
    app = context()
    return _json({"object": "list", "data": [_model(app, app.runtime.serving())]})


@blueprint.get("/v1/models/<path:name>")
def get_model(name: str) -> Response:
    """The model, by its name."""
    app = context()
    serving = app.runtime.serving()
    serving.check_name(name)
    return _json(_model(app, serving))


@blueprint.get("/v1/steering/vectors")
def list_vectors() -> Response:
    """All vectors of the server, also those of other models (`matches` false) and damaged ones (`error`)."""
    serving = context().runtime.serving()
    return _json({"object": "list", "data": [_vector(serving, name) for name in serving.store.names()]})


@blueprint.get("/v1/steering/vectors/<name>")
def get_vector(name: str) -> Response:
    """One vector with how it was made."""
    serving = context().runtime.serving()
    try:
        vector = serving.store.get(name)
    except VectorError as error:
        status = 404 if error.code == "unknown_vector" else 400
        raise ApiError(status, str(error), code=error.code, param="name") from error
    return _json(vector_json(vector, serving.mllm.fingerprint))


def _model(app: AppContext, serving: Serving) -> dict[str, Any]:
    mllm, settings, stats = serving.mllm, app.settings, serving.engine.stats()
    matching = [v["name"] for name in serving.store.names() if (v := _vector(serving, name)).get("matches")]
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.since,
        "owned_by": "helmsight",
        "fingerprint": mllm.fingerprint,
        "layers": mllm.num_layers,
        "hidden_size": mllm.hidden_size,
        "context_length": serving.engine.max_length,
        "device": str(mllm.device),
        "dtype": str(mllm.dtype).removeprefix("torch."),
        "image_size": None if mllm.image_size is None else list(mllm.image_size),
        "vectors": matching,
        "readouts": list(READOUTS),
        "limits": {
            "slots": int(stats["slots"]),
            "waiting": int(stats["max_waiting"]),
            "choices": settings.max_choices,
            "images": settings.max_images,
            "image_bytes": settings.max_image_bytes,
            "image_pixels": settings.max_image_pixels,
            "request_pixels": settings.max_request_pixels,
            "body_bytes": settings.max_body,
            "strength": settings.max_strength,
            "vectors": settings.max_vectors,
            "seconds": settings.request_timeout,
            "remote_images": settings.allow_remote_images,
        },
    }


def _vector(serving: Serving, name: str) -> dict[str, Any]:
    try:
        return vector_json(serving.store.get(name), serving.mllm.fingerprint)
    except VectorError as error:
        return {"object": "steering.vector", "name": name, "error": str(error)}


def vector_json(vector: SteeringVector, fingerprint: str | None = None) -> dict[str, Any]:
    """A vector without its numbers; `matches` says whether it was made for the model with `fingerprint`."""
    shown = {
        "object": "steering.vector",
        "name": vector.name,
        "kind": vector.kind,
        "layers": list(vector.layers),
        "fingerprint": vector.fingerprint,
        "info": vector.info,
    }
    return shown if fingerprint is None else {**shown, "matches": vector.fingerprint == fingerprint}


def _json(value: dict[str, Any]) -> Response:
    return Response(dumps(value), mimetype="application/json")
