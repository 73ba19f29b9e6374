"""The pages: the playground at /, the dashboard at /dashboard, their static files, and the sample scenes of the model."""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, render_template, request

from server.api.context import context
from server.encode import json_response
from server.errors import ApiError
from server.journal.words import WORDED
from server.process.preflight import TESTED
from server.web.samples import list_samples, sample_picture

blueprint = Blueprint("page", __name__, template_folder="../templates")

SHRUNK = ("text/html", "text/css", "text/javascript", "image/svg+xml")
STATIC = Path(__file__).parents[1] / "static"
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)


@blueprint.get("/")
def playground() -> Response:
    """Ask, steer, and see where the model looked."""
    return _page("playground.html")


@blueprint.get("/dashboard")
def dashboard() -> Response:
    """The journal of diagnostics, live."""
    return _page("dashboard.html", filters=WORDED)


@blueprint.get("/vectors")
def vectors() -> Response:
    """The steering vectors of the server, with how they were made."""
    return _page("vectors.html")


@blueprint.get("/model")
def model() -> Response:
    """The model, what it can do and its limits."""
    return _page("model.html")


@blueprint.get("/static/<name>")
@blueprint.get("/static/vendor/<name>", defaults={"folder": "vendor"})
def static_file(name: str, folder: str = "") -> Response:
    """A script, a style sheet or the icon of the pages; what others wrote stands in `vendor`."""
    # Compared with what is there instead of joined to the folder: no name from a request becomes a path.
    for file in (STATIC / folder).iterdir():
        if file.name == name and file.suffix in KINDS:
            return _file(file, KINDS[file.suffix])
    raise ApiError(404, "There is no such file.", code="unknown_file")


@blueprint.get("/about")
def about() -> Response:
    """What the page about the model tells beside /v1/models: its family, its check at load, what was measured of it."""
    able = context().runtime.serving().able
    return json_response({"object": "model.about", "families": sorted(TESTED), **able.about})


@blueprint.get("/samples")
def samples() -> Response:
    """The sample scenes in the model's folder: {"object": "list", "data": [{"title", "images", "question", "context"}]}."""
    found = list_samples(context().runtime.serving().able.folder)
    return json_response({"object": "list", "data": [sample.model_dump() for sample in found]})


@blueprint.get("/samples/<name>")
def sample(name: str) -> Response:
    """A picture of a sample scene."""
    found = sample_picture(context().runtime.serving().able.folder, name)
    if found is None:
        raise ApiError(404, "No sample has such a picture.", code="unknown_sample")
    return _cached(Response(found[0], content_type=found[1]))


@blueprint.after_request
def secure(response: Response) -> Response:
    """Nothing on these pages comes from elsewhere, runs inline, or is framed."""
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["Referrer-Policy"] = "no-referrer"
    return response


def _page(template: str, **values: Any) -> Response:
    return _cached(Response(render_template(template, **values), content_type="text/html; charset=utf-8"))


def _file(path: Path, kind: str) -> Response:
    return _cached(Response(path.read_bytes(), content_type=kind))


def _cached(response: Response) -> Response:
    """Kept by the browser, but asked for again each time: an update of the server is seen at once."""
    response.headers["Cache-Control"] = "no-cache"
    if response.mimetype in SHRUNK:
        response.vary.add("Accept-Encoding")
        if request.accept_encodings["gzip"] > 0:
            response.set_data(_gzip(response.get_data()))
            response.headers["Content-Encoding"] = "gzip"
    response.add_etag()
    response.make_conditional(request)
    return response


@lru_cache(maxsize=64)
def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)
