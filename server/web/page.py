"""The pages: the playground at /, the dashboard at /dashboard, their static files, and the model's sample scenes."""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path
from typing import Any

from flask import Blueprint, Response, current_app, render_template, request

from server.context import context
from server.encode import json_response
from server.errors import ApiError
from server.images.samples import KINDS as PICTURE_KINDS
from server.images.samples import list_samples, sample_picture
from server.journal.words import WORDED
from server.openapi.document import document
from server.openapi.operation import BYTES, TEXT, Parameter, documented
from server.openapi.reference import reference
from server.process.preflight import TESTED
from server.wire.sent.catalog import About, SampleList

blueprint = Blueprint("page", __name__, template_folder="../templates")

SHRUNK = ("text/html", "text/css", "text/javascript", "image/svg+xml")
STATIC = Path(__file__).parents[1] / "static"
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

_DOCS = "helmsight.docs"
HTML: dict[int, dict[str, Any]] = {200: {"text/html": TEXT}}
FILE: dict[int, dict[str, Any]] = {200: {kind.partition(";")[0]: TEXT for kind in KINDS.values()}}

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
@documented("Pages", HTML)
def playground() -> Response:
    """Show the playground, to ask, steer, and see where the model looked."""
    return _page("playground.html")


@blueprint.get("/docs")
@documented("Pages", HTML)
def docs() -> Response:
    """Show the API document."""
    cache = current_app.extensions
    if _DOCS not in cache:
        cache[_DOCS] = render_template("docs.html", **reference(document(current_app, context())))
    return _cached(Response(cache[_DOCS], content_type="text/html; charset=utf-8"))


@blueprint.get("/dashboard")
@documented("Pages", HTML)
def dashboard() -> Response:
    """Show the journal of diagnostics, live."""
    return _page("dashboard.html", filters=WORDED)


@blueprint.get("/vectors")
@documented("Pages", HTML)
def vectors() -> Response:
    """Show the server's steering vectors and how they were made."""
    return _page("vectors.html")


@blueprint.get("/model")
@documented("Pages", HTML)
def model() -> Response:
    """Show the model, its features and its limits."""
    return _page("model.html")


@blueprint.get("/static/<name>")
@documented(
    "Pages", FILE, errors=(404,), parameters=[Parameter("name", "The file's name.", example="style.css", place="path")]
)
def static_file(name: str) -> Response:
    """Return a script, a style sheet or the icon of the pages."""
    return _static(STATIC, name)


@blueprint.get("/static/vendor/<name>")
@documented(
    "Pages", FILE, errors=(404,), parameters=[Parameter("name", "The file's name.", example="jsdiff.js", place="path")]
)
def vendor_file(name: str) -> Response:
    """Return a third-party script of the pages, with its licence."""
    return _static(STATIC / "vendor", name)


def _static(folder: Path, name: str) -> Response:
    # Compared with existing files instead of joined to the folder, so that no request's name becomes a path.
    for file in folder.iterdir():
        if file.name == name and file.suffix in KINDS:
            return _file(file, KINDS[file.suffix])
    raise ApiError(404, "There is no such file.", code="unknown_file")


@blueprint.get("/about")
@documented("Pages", About, errors=(503,))
def about() -> Response:
    """Return what the model's page shows beyond /v1/models: family, check at load, and measured values."""
    serving = context().runtime.serving()
    serving.engine.calibration()  # takes in what was measured meanwhile
    return json_response({"object": "model.about", "families": sorted(TESTED), **serving.capabilities.about})


@blueprint.get("/samples")
@documented("Pages", SampleList, errors=(503,))
def samples() -> Response:
    """List the sample scenes in the model's folder."""
    scenes = list_samples(context().runtime.serving().capabilities.folder)
    return json_response({"object": "list", "data": [sample.model_dump() for sample in scenes]})


@blueprint.get("/samples/<name>")
@documented(
    "Pages",
    {200: dict.fromkeys(sorted(set(PICTURE_KINDS.values())), BYTES)},
    errors=(404, 503),
    parameters=[Parameter("name", "A name from a sample's `images`.", example="cyan.png", place="path")],
)
def sample(name: str) -> Response:
    """Return an image of a sample scene."""
    picture = sample_picture(context().runtime.serving().capabilities.folder, name)
    if picture is None:
        raise ApiError(404, "No sample has such an image.", code="unknown_sample")
    return _cached(Response(picture[0], content_type=picture[1]))


@blueprint.after_request
def secure(response: Response) -> Response:
    """Add headers that forbid foreign content, inline scripts and framing."""
    response.headers["Content-Security-Policy"] = POLICY
    response.headers["X-Frame-Options"] = "DENY"  # for browsers that do not support "frame-ancestors"
    response.headers["Referrer-Policy"] = "no-referrer"
    return response


def _page(template: str, **values: Any) -> Response:
    return _cached(Response(render_template(template, **values), content_type="text/html; charset=utf-8"))


def _file(path: Path, kind: str) -> Response:
    return _cached(Response(path.read_bytes(), content_type=kind))


def _cached(response: Response) -> Response:
    """Let browsers cache a response but revalidate it each time, so that an update of the server shows at once."""
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
