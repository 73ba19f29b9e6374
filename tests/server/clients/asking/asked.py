"""Requests that every client's script sends, and a report of what the client read in the answers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ["OPENAI_BASE_URL"]
PICTURE = os.environ["PICTURE"]
MODEL = os.environ.get("MODEL", "helmsight-demo")
END = os.environ.get("END", "1")
"""The id of the token that ends an answer of the toy that knows tools."""
QUESTION = "What colour is it?"
SHOWN = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": PICTURE}}]


class Colour(BaseModel):
    """The colour of the thing."""

    colour: Literal["red", "green", "blue"]
    sure: bool


def get_weather(city: str) -> str:
    """The weather in a city."""  # noqa: D401 -- the description of a tool
    return f"Fine in {city}."


def see(what: str, call: Callable[[], Any]) -> None:
    """Say what came of a call: its value, or the exception that the client made of an answer.

    With ONLY in the environment, the calls whose names lack that text are left out.
    """
    if os.environ.get("ONLY", "") not in what:
        return
    try:
        print(f"{what}: {call()!r:.300}")
    except Exception as error:
        print(f"{what}: raised {type(error).__name__}: {error!s:.300}")


def end(package: str) -> None:
    print(json.dumps({"client": package, "version": version(package)}))
