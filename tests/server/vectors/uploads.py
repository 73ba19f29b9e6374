"""Vectors that are sent to an application, and what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flask.testing import FlaskClient

from steering import SteeringVector

ROUTE = "/v1/steering/vectors"
QUESTION = "What colour is it?"
BINARY = "application/octet-stream"
MakeVector = Callable[..., SteeringVector]


def upload(client: FlaskClient, vector: SteeringVector | bytes, query: str = "", kind: str = BINARY) -> Any:
    data = vector if isinstance(vector, bytes) else vector.to_bytes()
    return client.post(ROUTE + query, data=data, content_type=kind)


def problem(response: Any) -> tuple[int, str, str | None]:
    return response.status_code, response.json["error"]["code"], response.json["error"]["param"]


def metadata_of(data: bytes) -> dict[str, str]:
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"])


def validate(client: FlaskClient, **body: Any) -> Any:
    return client.post("/v1/steering/validate", json=body)
