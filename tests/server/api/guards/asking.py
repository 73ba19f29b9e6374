"""Chats with guards, and an application with presets and a journal that answers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import PresetTable, Settings
from tests.server.conftest import TOLD
from tests.server.dialects.speaking import STREAMS

CHAT = "/v1/chat/completions"
BASE: dict[str, Any] = {"messages": TOLD, "max_tokens": 6, "temperature": 0}
THEN = {"steering": {"toward": "text", "strength": 2.0}}
READ = {"diagnostics": {"include": ["modality", "confidence"]}}


@contextmanager
def journaling(
    engine: steering.Engine, folders: pytest.TempPathFactory, presets: dict[str, dict[str, Any]]
) -> Iterator[FlaskClient]:
    """Hold a client of an application with a journal and these presets."""
    tables = {name: PresetTable(fields=fields) for name, fields in presets.items()}
    app = create_app(Settings(journal=str(folders.mktemp("journal") / "journal.db"), presets=tables), engine=engine)
    yield app.test_client()
    app.extensions["helmsight"].journal.close()


def ask(client: FlaskClient, **fields: Any) -> Any:
    """Return the answer to `BASE` with these fields, whole also where it was streamed."""
    response = client.post(CHAT, json=BASE | fields, buffered=True)
    assert response.status_code == 200, response.text
    return response.json if not fields.get("stream") else STREAMS["chat"](response.text)
