"""The OpenAPI document of an application: its routes, and the schemas of the bodies that they read and answer with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from http import HTTPStatus
from operator import or_
from typing import Any

from flask import Flask
from pydantic import BaseModel, TypeAdapter
from werkzeug.routing import Rule

from probes.answering.versions import versions
from server.access.auth import OPEN_FOLDER, OPEN_ROUTES
from server.context import AppContext
from server.openapi.operation import JSON, OPERATIONS, Content, Operation, Parameter
from server.wire.interventions import bounded
from server.wire.sent.answers import ErrorBody

ABOUT = (
    "OpenAI's chat completions and responses, and Anthropic's messages, for multimodal models. Requests may also steer the "
    "model, change how it reads images, and ask where it looked. Unknown fields of these protocols are ignored and listed "
    "in the answer; unknown keys of Helmsight's own are errors."
)
TAGS = {
    "Chat": "Answers, whole or streamed.",
    "Stored answers": "Answers that their requests asked to store, each for its own key.",
    "Models": "The model, its presets and its limits.",
    "Steering": "Steering vectors, and a dry run.",
    "Journal": "Numbers of past requests and answers.",
    "Operations": "Health, metrics and this document, for operators.",
    "Pages": "The web pages and their files.",
}
ERRORS = {
    400: "A field or a parameter is invalid; `param` names it.",
    401: "A key is required, or it is wrong or has expired.",
    403: "Not allowed: the request's Host or Origin, an action beyond its key's roles, or a disabled feature.",
    404: "Nothing with that name exists.",
    409: "It conflicts with an existing one.",
    413: "The body is too large.",
    415: "The body is of another media type, or compressed.",
    429: "Too many requests are waiting, too many large grammars are in use, or the key has reached its limit.",
    500: "An error of the server, which has been logged.",
    503: "Not served now: the model is loading, draining or has failed, or the journal cannot be read.",
    504: "The answer took longer than the server allows.",
    507: "The disk is full.",
}
UNREAD = (
    "A request that cannot be read, after which the connection is closed: 400 (invalid HTTP or chunks), "
    "408 (it did not arrive in time), 413 (too many chunks), 414 and 431 (request line or head too long), 417 (unsupported "
    "expectation), 501 (unsupported transfer coding); `code` identifies the error."
)
HEADERS = {
    401: {"WWW-Authenticate": "Requests a bearer token."},
    429: {"Retry-After": "Seconds to wait."},
    503: {"Retry-After": "Seconds to wait; absent if waiting does not help."},
}
ALWAYS = (403, 500)
BEARER, API_KEY = "bearer", "api_key"
_KEPT = "helmsight.openapi"
_VARIABLE = re.compile(r"<(?:\w+:)?(\w+)>")


def document(app: Flask, context: AppContext) -> dict[str, Any]:
    """Return the document, with the interventions and readouts registered when it was first requested."""
    if _KEPT not in app.extensions:  # cached, since it takes a tenth of a second and needs no key
        app.extensions[_KEPT] = _build(app, context)
    openapi: dict[str, Any] = app.extensions[_KEPT]
    return openapi


def _build(app: Flask, context: AppContext) -> dict[str, Any]:
    schemas = Schemas()
    keys = context.settings.asks_for_key
    paths: dict[str, Any] = {}
    others: dict[type[BaseModel], None] = {}
    for rule, operation, description in operations(app):
        if operation.error is not ErrorBody:
            others[operation.error] = None
        path = _VARIABLE.sub(r"{\1}", rule.rule)
        for method in methods(rule):
            paths.setdefault(path, {})[method] = _operation(rule, operation, description, context, schemas)
    models: list[type[BaseModel]] = [ErrorBody, *others]
    errors = {
        name_of(status, model): _with_headers(_error(about, schemas, model), HEADERS.get(status, {}))
        for model in models
        for status, about in ERRORS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Helmsight", "version": versions()["helmsight"], "description": ABOUT},
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": about} for name, about in TAGS.items()],
        "security": [*([] if keys else [{}]), {BEARER: []}, {API_KEY: []}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.found.items())),
            "responses": errors | {"Unread": _error(UNREAD, schemas)},
            "securitySchemes": {
                BEARER: {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "A key of the server, if it was started with `--api-key` or `--named-key-file`.",
                },
                API_KEY: {
                    "type": "apiKey",
                    "in": "header",
                    "name": "x-api-key",
                    "description": "The same key, as Anthropic's clients send it.",
                },
            },
        },
    }


def operations(app: Flask) -> Iterator[tuple[Rule, Operation, str]]:
    """Yield the documented routes of an application, each with its operation and its view's docstring."""
    for rule in app.url_map.iter_rules():
        view = app.view_functions[rule.endpoint]
        if (operation := OPERATIONS.get(view)) is not None:
            yield rule, operation, inspect.getdoc(view) or ""


def methods(rule: Rule) -> list[str]:
    """Return a route's methods without HEAD and OPTIONS, which are implied."""
    return sorted(method.lower() for method in (rule.methods or set()) - {"HEAD", "OPTIONS"})


class Schemas:
    """The schemas of models, each included once."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def of(self, content: Content, reading: bool = False) -> dict[str, Any]:
        """Return the schema of a body with references to its models, as the server reads or writes it."""
        if isinstance(content, Mapping):
            return dict(content)
        models = list(content) if isinstance(content, Sequence) else [content]
        unbounded = TypeAdapter(reduce(or_, models)).json_schema(
            ref_template="#/components/schemas/{model}", mode="validation" if reading else "serialization"
        )
        schema: dict[str, Any] = bounded(unbounded, None)  # the document may be requested before a model is loaded
        for name, definition in schema.pop("$defs", {}).items():
            self._keep(name, definition)
        if len(models) == 1 and "$ref" not in schema:
            name = models[0].__name__
            self._keep(name, schema)
            return {"$ref": f"#/components/schemas/{name}"}
        return schema

    def _keep(self, name: str, schema: dict[str, Any]) -> None:
        if self.found.setdefault(name, schema) != schema:
            raise ValueError(f"Two models of the document are called {name!r}.")


def _operation(
    rule: Rule, operation: Operation, description: str, context: AppContext, schemas: Schemas
) -> dict[str, Any]:
    summary, _, details = " ".join(description.split()).partition(". ")
    is_open = rule.rule in OPEN_ROUTES or rule.rule.startswith(OPEN_FOLDER)
    errors = sorted({*operation.errors, *ALWAYS, *(() if is_open else (401,))})
    responses = {
        str(status): _response(operation, status, answers, schemas) for status, answers in operation.answers.items()
    }
    responses |= {
        str(status): {"$ref": f"#/components/responses/{name_of(status, operation.error)}"}
        for status in errors
        if status not in operation.answers
    }
    responses["default"] = {"$ref": "#/components/responses/Unread"}
    entry: dict[str, Any] = {
        "operationId": rule.endpoint.rpartition(".")[2],
        "tags": [operation.tag],
        "summary": summary.removesuffix("."),
        **({"description": details} if details else {}),
        **(
            {"parameters": [_parameter(parameter) for parameter in operation.parameters]}
            if operation.parameters
            else {}
        ),
    }
    if operation.body:
        content = {kind: {"schema": schemas.of(body(context), reading=True)} for kind, body in operation.body.items()}
        if examples := operation.examples():
            content[JSON]["examples"] = {
                name: {"summary": example.about, "value": example.value} for name, example in examples.items()
            }
        entry["requestBody"] = {"required": True, "content": content}
    entry["responses"] = responses
    return entry | ({"security": []} if is_open else {})


def _response(operation: Operation, status: int, answers: Mapping[str, Content], schemas: Schemas) -> dict[str, Any]:
    content = {kind: {"schema": schemas.of(answer)} for kind, answer in answers.items()}
    headers = operation.headers if status < 400 else {}
    return _with_headers({"description": HTTPStatus(status).phrase, "content": content}, headers)


def _error(about: str, schemas: Schemas, model: type[BaseModel] = ErrorBody) -> dict[str, Any]:
    return {"description": about, "content": {JSON: {"schema": schemas.of(model)}}}


def _with_headers(response: dict[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    shown = {name: {"description": about, "schema": {"type": "string"}} for name, about in headers.items()}
    return {**response, "headers": shown} if shown else response


def _parameter(parameter: Parameter) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.about,
        "schema": parameter.schema(),
    }
    return (
        entry
        | ({"style": "deepObject", "explode": True} if entry["schema"].get("type") == "object" else {})
        | ({"required": True} if parameter.place == "path" else {})
        | ({} if parameter.example is None else {"example": parameter.example})
    )


def name_of(status: int, model: type[BaseModel]) -> str:
    """Return the name of the document's response for an error of a status in a model's form."""
    own = "" if model is ErrorBody else model.__name__
    return own + HTTPStatus(status).phrase.title().replace(" ", "")
