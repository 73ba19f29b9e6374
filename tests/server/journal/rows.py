"""The rows that an application has written, as its routes show them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
from flask.testing import FlaskClient

from server.journal.database import Database
from tests.server.journal.journals import settled

Sdk = Callable[..., openai.OpenAI]
Serve = Callable[..., FlaskClient]


def journal_of(client: FlaskClient) -> Any:
    return client.application.extensions["helmsight"].journal


def database_of(client: FlaskClient) -> Database:
    """Return the journal's database with all rows so far.

    The first answers do not wait for theirs, as the journal is still being opened.
    """
    journal = journal_of(client)
    assert journal.settle_all(), journal.status()
    return journal.database()  # type: ignore[no-any-return]


def rows_of(client: FlaskClient, count: int) -> list[dict[str, Any]]:
    """All rows, newest first, once there are `count`."""
    settled(journal_of(client), count)
    response = client.get("/v1/diagnostics?limit=1000")
    assert response.status_code == 200, response.text
    assert len(response.json["data"]) == count
    return response.json["data"]  # type: ignore[no-any-return]
