"""Steering vectors over HTTP: list, show, fetch, upload, delete, and a dry run of a request's steering."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, request

import steering
from server.api.body import read_bytes, read_json
from server.api.dry_run import validate
from server.context import AppContext, context
from server.encode import json_response
from server.engine.runtime import Serving
from server.errors import ApiError, BadRequest
from server.openapi.examples import of_dry_run
from server.openapi.operation import BYTES, JSON, Parameter, documented
from server.vectors.registry import Registry
from server.wire.sent.catalog import DeletedVector, DryRunReport, ListOfVectors, VectorCard
from steering import Steer, SteeringVector, VectorError

log = logging.getLogger("helmsight")

blueprint = Blueprint("vectors", __name__)

MEDIA_TYPES = (
    "application/octet-stream",
    "application/safetensors",
    "application/x-safetensors",
    "application/vnd.safetensors",
)
MAX_INFO = 256 * 2**10
"""Longest JSON in characters of an uploaded vector's `info`, since lists repeat it."""
MAX_KIND = 64

_STATUS = {
    "unknown_vector": 404,
    "vector_exists": 409,
    "too_many_vectors": 409,
    "vector_read_only": 403,
    "registry_busy": 503,
}


def _name_schema() -> dict[str, Any]:
    return {"type": "string", "pattern": f"^{steering.NAME.pattern}$"}


_NAME = Parameter("name", "The listed name.", example="modality-preference", place="path")


@blueprint.get("/v1/steering/vectors")
@documented("Steering", ListOfVectors, errors=(503,))
def list_vectors() -> Response:
    """List all vectors of the server, including those of other models (`matches` false) and damaged ones (`error`).

    The features of its sparse dictionaries are vectors too, by the name `sae:DICTIONARY/FEATURE`.
    """
    serving = context().runtime.serving()
    return json_response(
        {
            "object": "list",
            "data": [vector_or_error(serving, name) for name in serving.store.names()],
            "dictionaries": [_dictionary_or_error(serving, name) for name in serving.store.dictionaries(every=True)],
        }
    )


@blueprint.get("/v1/steering/vectors/<name>")
@documented("Steering", VectorCard, errors=(400, 404, 503), parameters=[_NAME])
def get_vector(name: str) -> Response:
    """Return a vector with the details of how it was made."""
    serving = context().runtime.serving()
    with _explained("name"):
        return json_response(vector_json(serving.store.get(name), serving.capabilities.fingerprint))


@blueprint.get("/v1/steering/vectors/<name>/file")
@documented(
    "Steering",
    {200: {MEDIA_TYPES[0]: BYTES}},
    errors=(400, 404, 503),
    parameters=[_NAME],
    headers={"Content-Disposition": "The file's name."},
)
def get_file(name: str) -> Response:
    """Return a vector's safetensors file."""
    with _explained("name"):
        data = context().runtime.serving().store.read(name)
    headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    return Response(data, headers=headers, mimetype=MEDIA_TYPES[0])


@blueprint.post("/v1/steering/vectors")
@documented(
    "Steering",
    {201: {JSON: VectorCard}},
    errors=(400, 409, 413, 415, 503, 507),
    parameters=[
        Parameter("name", "The vector's new name; its own name by default.", _name_schema, "a-copy"),
        Parameter("replace", "Replace an existing vector of that name.", lambda: {"enum": ["true", "false"]}, "true"),
    ],
    body=dict.fromkeys(MEDIA_TYPES, lambda app: BYTES),
    headers={"Location": "The path of the new vector."},
)
def upload_vector() -> Response:
    """Add a vector, if the server allows uploads; the body is its safetensors file."""
    app = context()
    serving = app.runtime.serving()
    registry = registry_of(app, serving)
    name, over = _query()
    if request.mimetype not in MEDIA_TYPES:
        raise ApiError(
            415,
            f"The body must be a safetensors file: send 'Content-Type: {MEDIA_TYPES[0]}'.",
            code="unsupported_media_type",
        )
    data = read_bytes(app.settings.max_vector_bytes)
    with serving.pictures.turn(), _explained():
        vector = SteeringVector.from_bytes(data)
        _check(vector, serving)
    with _explained("name"):
        vector = vector if name is None else vector.named(name)
        # Serialised anew, so that only checked content is stored.
        registry.add(vector, over)
    log.info("steering vector %s was uploaded", vector.name)
    location = {"Location": f"/v1/steering/vectors/{vector.name}"}
    return json_response(vector_json(vector, serving.capabilities.fingerprint), 201, location)


@blueprint.delete("/v1/steering/vectors/<name>")
@documented("Steering", DeletedVector, errors=(404, 503), parameters=[replace(_NAME, example="a-copy")])
def delete_vector(name: str) -> Response:
    """Delete an uploaded vector; running requests keep it."""
    app = context()
    registry = registry_of(app, app.runtime.serving())
    with _explained("name"):
        registry.remove(name)
    log.info("steering vector %s was deleted", name)
    return json_response({"name": name, "object": "steering.vector", "deleted": True})


@blueprint.post("/v1/steering/validate")
@documented(
    "Steering",
    DryRunReport,
    errors=(400, 404, 413, 415, 503),
    body={JSON: lambda app: app.dry_runs},
    examples=of_dry_run,
)
def dry_run() -> Response:
    """Report what a request asks for and what would be applied, without generating; errors are those of a chat request."""
    app = context()
    serving = app.runtime.serving()
    return json_response(validate(read_json(app), serving, app))


def registry_of(app: AppContext, serving: Serving) -> Registry:
    """Return the writable folder, which is the first configured one; raises a 403 if there is none."""
    folders = [Path(folder).expanduser() for folder in app.settings.vectors]
    if not app.settings.allow_uploads:
        raise ApiError(
            403,
            "Uploading and deleting steering vectors is off; the server allows it with --allow-uploads.",
            code="uploads_disabled",
        )
    if not folders:
        raise ApiError(
            403, "There is no folder for uploaded steering vectors; name one with --vectors.", code="uploads_disabled"
        )
    others = [folder for folder in serving.store.folders if folder != folders[0]]
    return Registry(folders[0], others, app.settings.max_uploaded_vectors)


def vector_or_error(serving: Serving, name: str) -> dict[str, Any]:
    """Return a vector for a list; a damaged one has an `error`."""
    try:
        return vector_json(serving.store.get(name), serving.capabilities.fingerprint)
    except VectorError as error:
        return {"object": "steering.vector", "name": name, "error": str(error)}
    except OSError as error:  # the path stays private
        return {"object": "steering.vector", "name": name, "error": f"The file cannot be read: {error.strerror}."}


def _dictionary_or_error(serving: Serving, name: str) -> dict[str, Any]:
    try:
        dictionary = serving.store.dictionary(name)
    except VectorError as error:
        return {"name": name, "error": str(error)}
    except OSError as error:  # the path stays private
        return {"name": name, "error": f"The file cannot be read: {error.strerror}."}
    keys = ("name", "layer", "width", "features", "architecture", "model")
    matches = dictionary.fits(serving.capabilities.layers, serving.capabilities.hidden_size)
    return {**{key: getattr(dictionary, key) for key in keys}, "matches": matches}


def vector_json(vector: SteeringVector, fingerprint: str | None = None) -> dict[str, Any]:
    """Return a vector without its numbers.

    `digest` changes with everything that an answer takes from it. `positive` is the modality that a positive scale pushes
    toward, None for a vector that is no modality preference. `published` is its strength 1 in published units, None if
    unknown. `matches` tells whether it was made for the model with `fingerprint`.
    """
    shown = {
        "object": "steering.vector",
        "name": vector.name,
        "digest": vector.identity,
        "kind": vector.kind,
        "positive": vector.positive,
        "layers": list(vector.layers),
        "published": vector.published,
        "fingerprint": vector.fingerprint,
        "info": vector.info,
    }
    return shown if fingerprint is None else {**shown, "matches": vector.fingerprint == fingerprint}


def _query() -> tuple[str | None, bool]:
    """Return the (name, replace) parameters of an upload."""
    for key in request.args:
        if key not in ("name", "replace"):
            raise BadRequest(f"'{key[:64]}' is unknown; allowed: name, replace.", key[:64], "unknown_parameter")
    over = request.args.get("replace", "false")
    if over not in ("true", "false"):
        raise BadRequest(f"'replace' must be true or false; got {over[:64]!r}.", "replace")
    name = request.args.get("name")
    if name is not None and not steering.NAME.fullmatch(name):
        raise BadRequest(f"'name' must match {steering.NAME.pattern}; got {name[:128]!r}.", "name", "bad_vector_name")
    return name, over == "true"


def _check(vector: SteeringVector, serving: Serving) -> None:
    """Refuse a vector that this server could not use or whose description is too long to list."""
    serving.engine.check_steer(Steer(vector, 1.0))
    if len(json.dumps(vector.info)) > MAX_INFO or len(vector.kind) > MAX_KIND:
        raise VectorError(
            f"The 'info' of a steering vector may have at most {MAX_INFO} characters of JSON, its 'kind' at most "
            f"{MAX_KIND}.",
            code="bad_vector",
        )


@contextmanager
def _explained(param: str | None = None) -> Iterator[None]:
    """Convert errors of a vector or of the disk into errors with a status of their own."""
    try:
        yield
    except VectorError as error:
        status = _STATUS.get(error.code, 400)
        raise ApiError(
            status, str(error), code=error.code, param=param, retry_after=1.0 if status == 503 else None
        ) from error
    except OSError as error:
        log.error("steering vectors: %s", error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ApiError(507, "The disk is full; nothing was changed.", code="storage_full") from error
        raise ApiError(500, "The folder of steering vectors cannot be used.", code="storage_failed") from error
