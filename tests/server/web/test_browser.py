"""Visits share a browser, one after another, and find nothing there of those before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Contexts

WRITE = """async () => {
    localStorage.setItem("a", "1");
    sessionStorage.setItem("a", "1");
    document.cookie = "a=1; max-age=900";
    await new Promise((resolve) => { indexedDB.open("a").onsuccess = resolve; });
    addEventListener("pagehide", () => localStorage.setItem("b", "1"));
}"""
READ = """async () => [
    localStorage.length, sessionStorage.length, document.cookie, (await indexedDB.databases()).length, navigator.onLine,
]"""


def test_a_visit_finds_nothing_of_those_before(contexts: Contexts, live: Callable[[Flask], str]) -> None:
    url = live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/static/icon.svg"  # type: ignore[arg-type]
    options: Any = {"viewport": {"width": 640, "height": 480}, "locale": "en-NZ"}  # the locale of no other visit
    first = contexts.open(**options)
    first.page.goto(url)
    nothing = first.page.evaluate(READ)
    first.page.evaluate(WRITE)
    first.context.set_offline(True)
    assert first.page.evaluate(READ) == [1, 1, "a=1", 1, False]
    contexts.close(first)

    again = contexts.open(**options)
    assert again.context is first.context
    again.page.goto(url)
    assert again.page.evaluate(READ) == nothing == [0, 0, "", 0, True]
    beside = contexts.open(**options)  # "in another browser"
    assert beside.context is not again.context
    contexts.close(again)
    contexts.close(beside)
