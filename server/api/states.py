"""Hidden states of recent answers over HTTP, as safetensors files."""

from __future__ import annotations

from flask import Blueprint, Response

from server.access.auth import caller
from server.api.query import parameters
from server.context import context
from server.errors import ApiError
from server.openapi.operation import BYTES, Parameter, documented

blueprint = Blueprint("states", __name__)

MEDIA_TYPE = "application/octet-stream"


@blueprint.get("/v1/states/<name>")
@documented(
    "Chat",
    {200: {MEDIA_TYPE: BYTES}},
    errors=(400, 404),
    parameters=[Parameter("name", "The `file` of an answer's `diagnostics.states`.", place="path")],
)
def get_states(name: str) -> Response:
    """Return hidden states that were too large for their answer, to the key that asked for them."""
    parameters(())
    data = context().files.find(name, caller().owner)
    if data is None:
        raise ApiError(
            404,
            "There are no such states of this key; only the latest ones are kept.",
            code="unknown_file",
            param="name",
        )
    headers = {"Content-Disposition": f'attachment; filename="{name}.safetensors"'}
    return Response(data, mimetype=MEDIA_TYPE, headers=headers)
