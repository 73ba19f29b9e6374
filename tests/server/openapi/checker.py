"""A client that holds every answer to what the document of its server says of it."""

from __future__ import annotations

import json
from typing import Any

from flask.testing import FlaskClient
from jsonschema import Draft202012Validator


def strict(schema: Any) -> Any:
    """Return a schema that allows no properties beyond those that it names."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: strict(one) for name, one in schema.items()}
    if isinstance(found.get("properties"), dict) and "type" in found:
        found.setdefault("additionalProperties", False)
    return found


def events_of(text: str, path: str) -> list[Any]:
    """Return the data of a stream's events, after checking the form of the events on that route."""
    *events, end = text.split("\n\n")
    assert end == ""
    events = [event for event in events if not event.startswith(":")]  # comments
    if path == "/v1/chat/completions":
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]
    pairs = [event.split("\ndata: ") for event in events]
    values = [json.loads(data) for _, data in pairs]
    assert [kind for kind, _ in pairs] == [f"event: {value['type']}" for value in values]
    return values


class Checker:
    """Checks answers against the document of their server."""

    def __init__(self, client: FlaskClient):
        self.client = client
        self.document = client.get("/openapi.json").json
        self.schemas = strict(self.document["components"]["schemas"])
        self.validators: dict[str, Draft202012Validator] = {}
        self.seen: set[tuple[str, str, int]] = set()

    def valid(self, value: Any, schema: dict[str, Any]) -> None:
        text = json.dumps(schema)
        if text not in self.validators:
            self.validators[text] = Draft202012Validator({"components": {"schemas": self.schemas}, **json.loads(text)})
        self.validators[text].validate(value)

    def send(self, method: str, path: str, url: str | None = None, **options: Any) -> Any:
        """Ask, and hold the answer to what the route's operation says of its status."""
        response = self.client.open(url or path, method=method.upper(), buffered=True, **options)
        responses = self.document["paths"][path][method]["responses"]
        said = responses.get(str(response.status_code))
        assert said is not None, f"{method} {path} answered {response.status_code}: {response.text[:300]}"
        if "$ref" in said:
            said = self.document["components"]["responses"][said["$ref"].rpartition("/")[2]]
        schema = said["content"][response.mimetype]["schema"]
        if response.mimetype == "application/json":
            self.valid(response.json, schema)
        elif response.mimetype == "application/x-ndjson":
            for line in response.text.splitlines():
                self.valid(json.loads(line), schema)
        elif response.mimetype == "text/event-stream":
            for event in events_of(response.text, path):
                self.valid(event, schema)
        for header in said.get("headers", {}):
            assert header in response.headers or response.status_code == 503, (path, header)
        self.seen.add((path, method, response.status_code))
        return response
