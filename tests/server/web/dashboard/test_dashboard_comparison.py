"""Filters by preset and metadata, and two selections side by side, over a real journal in a real browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.journal.journals import put, row
from tests.server.web.browser import Visit


@pytest.fixture
def page(live: Callable[[Flask], str], visit: Callable[..., Visit], tmp_path: Path) -> Any:
    app = create_app(Settings(journal=str(tmp_path / "journal.db")), engine=FakeEngine())  # type: ignore[arg-type]
    now, week = time.time() - 60, 7 * 86_400
    groups = [("sage", "a", 0.25, now), ("plain", "b", 0.5, now), ("sage", "a", 0.75, now - week)]
    rows = [
        row(10 * group + number, preset=preset, metadata=f'{{"shop":"{shop}"}}', attention_ratio=ratio, created=created)
        for group, (preset, shop, ratio, created) in enumerate(groups)
        for number in range(group + 2)
    ]
    put(app.extensions["helmsight"].journal.database(), *rows)
    opened = visit().page
    opened.goto(live(app) + "/dashboard")
    opened.wait_for_selector("#content:not([hidden])")
    yield opened
    app.extensions["helmsight"].journal.close()


def table(page: Any) -> dict[str, list[str]]:
    lines = page.locator("#comparison tbody tr").all_inner_texts()
    return {name.lower(): values for name, *values in (line.split("\t") for line in lines)}


def test_two_presets_and_two_weeks(page: Any) -> None:
    assert page.locator("#comparison table").count() == 0
    page.locator("#f-preset").fill("sage")
    page.locator("#f-preset").press("Enter")
    page.locator("#c-preset").fill("plain")
    page.locator("#c-preset").press("Tab")
    page.locator("#comparison table").wait_for()
    found = table(page)
    assert found["answers"] == ["2", "3"]
    assert found["attention ratio, median"] == ["0.250", "0.500"]
    page.locator("#c-preset").fill("")
    page.locator("#c-time").select_option("week")
    page.locator("#comparison td", has_text="0.750").first.wait_for()
    assert table(page)["answers"] == ["2", "4"]


def test_metadata_filter_the_answers(page: Any) -> None:
    page.locator("#f-metadata").fill("shop=b")
    page.locator("#f-metadata").press("Tab")
    page.locator("#tiles dd b", has_text="3").first.wait_for()
    assert page.locator("#rows tr").count() == 3
    page.locator("#c-metadata").fill("shop=a")
    page.locator("#c-metadata").press("Tab")
    page.locator("#comparison table").wait_for()
    assert table(page)["answers"] == ["3", "2"]
