"""The playground on the embedded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.web.browser import Visit


@pytest.fixture(scope="module")
def demo(engine: steering.Engine) -> Flask:
    """Return an application of the embedded model with its own vector, without a journal."""
    return create_app(Settings(vectors=(), slots=4, max_waiting=8, journal="off"), engine=engine)  # type: ignore[arg-type]


@pytest.fixture
def playground(demo: Flask, live: Callable[[Flask], str], visit: Callable[..., Visit]) -> Callable[..., Visit]:
    """Open the playground and wait until it knows its server."""

    def begin(**options: Any) -> Visit:
        opened = visit(**options)
        opened.page.goto(live(demo))
        opened.page.wait_for_selector(".sample")
        return opened

    return begin
