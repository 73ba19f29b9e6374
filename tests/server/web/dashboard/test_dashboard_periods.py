"""The dashboard's charts over time, read by keys and pointer, and zoomed, over known periods."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit, eventually, until
from tests.server.web.known_journal import HOUR, NOW, SUMMARY, Journal, period

DAY = 86_400


@pytest.fixture
def known(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> Callable[..., tuple[Any, Journal]]:
    """Open the dashboard over the known rows, which are of hours."""
    url = live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/dashboard"  # type: ignore[arg-type]

    def begin(query: str = "", timezone_id: str = "UTC") -> tuple[Any, Journal]:
        page = visit(now=NOW, timezone_id=timezone_id, locale="en-GB").page
        journal = Journal(page)
        page.goto(url + query)
        page.wait_for_selector("#chart-total canvas")
        return page, journal

    return begin


def read(page: Any, chart: str, key: str) -> str:
    """Return the text about the period that a key leads to."""
    page.locator(f"#chart-{chart} .plot").focus()
    page.keyboard.press(key)
    page.wait_for_timeout(60)
    return str(page.locator(f"#chart-{chart} .tip").inner_text())


def said(page: Any, chart: str, *keys: str) -> list[str]:
    """Return the numbers alone, in the order of the legend."""
    for key in keys:
        read(page, chart, key)
    return list(page.locator(f"#chart-{chart} .tip b").all_inner_texts())


def test_every_period_is_read_by_keys(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, _ = known()
    assert said(page, "requests", "End") == ["10", "5"]
    assert said(page, "requests", "ArrowLeft") == ["–", "2"]  # an hour without an answer
    assert said(page, "requests", "ArrowLeft") == ["30", "0"]
    first = read(page, "requests", "Home")
    hours = "ArrowRight " * 24
    assert said(page, "requests", *hours.split()) == ["10", "5"]  # 24 steps from the first period to the last
    assert first != read(page, "requests", "End")
    assert said(page, "attention", "End") == ["0.250"]
    assert said(page, "first", "End") == ["100 ms", "200 ms"]
    assert said(page, "total", "End") == ["1.00 s", "2.00 s"]
    assert said(page, "flags", "End", "ArrowLeft", "ArrowLeft") == ["1", "2"]
    # of 10 answers, 1 failed and 2 cancelled, and 5 that were refused
    assert said(page, "failures", "End") == ["33 %", "6.7 %", "13 %"]
    page.locator("#measure").focus()
    assert page.locator("#chart-failures .tip").is_hidden()


def test_bars_are_as_high_as_their_numbers(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, _ = known()
    heights = page.evaluate(
        """() => {
            const canvas = document.querySelector("#chart-attention").parentElement.querySelector("#chart-requests canvas");
            const swatch = document.querySelector("#chart-requests .swatch");
            const [r, g, b] = getComputedStyle(swatch).backgroundColor.match(/[0-9.]+/g).map(Number);
            const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const found = [];
            for (let x = 0; x < width; x++) {
                let count = 0;
                for (let y = 0; y < height; y++) {
                    const at = 4 * (y * width + x);
                    if (Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b) < 6) count++;
                }
                found.push(count);
            }
            return found;
        }"""
    )
    bars = sorted({height for height in heights if height > 3})
    assert bars[-1] / bars[0] == pytest.approx(3.0, abs=0.35)  # 30 answers and 10


def test_a_part_is_chosen_by_dragging(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known("?toward=text")
    box = page.locator("#chart-requests .u-over").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    assert page.locator("#chart-requests .tip").is_visible()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 40, steps=5)
    page.mouse.up()
    until(page, "location.search.includes('until=')")
    given = {name: value for name, (value,) in parse_qs(urlsplit(page.url).query).items()}
    start, span = HOUR - 24 * 3600, 25 * 3600
    assert float(given["since"]) == pytest.approx(start + 0.5 * span, abs=600)
    assert float(given["until"]) == pytest.approx(start + 0.75 * span, abs=600)
    page.get_by_role("button", name="Whole time").wait_for()
    asked = journal.summaries()[-1]
    assert (asked["since"], asked["until"], asked["toward"]) == (given["since"], given["until"], "text")
    page.get_by_role("button", name="Whole time").click()
    until(page, "location.search === '?toward=text'")


def test_a_part_stands_in_the_address(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known(f"?since={HOUR - 7200}&until={HOUR}")
    assert (journal.queries[0]["since"], journal.queries[0]["until"]) == (str(HOUR - 7200), str(HOUR))
    page.get_by_text("15 min", exact=True).click()
    until(page, "location.search === '?range=15m'")
    eventually(page, lambda: journal.summaries()[-1].keys() == {"path", "since"})
    assert float(journal.summaries()[-1]["since"]) == pytest.approx(NOW - 900, abs=5)


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_what_is_filtered_is_saved(known: Callable[..., tuple[Any, Journal]], form: str) -> None:
    page, journal = known(f"?toward=text&since={HOUR - 7200}&until={HOUR}")
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Save {form.upper()}").click()
    assert download.value.suggested_filename == f"helmsight-answers.{form}"
    (asked,) = [query for query in journal.queries if query.get("format") == form]
    assert asked == {
        "path": "/v1/diagnostics",
        "since": str(HOUR - 7200),
        "until": str(HOUR),
        "toward": "text",
        "format": form,
    }


def redraw(page: Any, journal: Journal, summary: dict[str, Any]) -> Callable[[str], list[tuple[str, float]]]:
    """Show all time of another summary; returns what a chart then has written on its canvas: texts and where."""
    page.evaluate(
        """() => {
            window.written = [];
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
                window.written.push([this.canvas.closest("section").id, text, this.getTransform().e + x]);
                return write.call(this, text, x, y);
            };
        }"""
    )
    journal.summary = summary
    page.get_by_text("All", exact=True).click()
    until(page, "window.written.some(([chart]) => chart === 'chart-decay')")
    return lambda chart: [(text, x) for id, text, x in page.evaluate("window.written") if id == f"chart-{chart}"]


def months(text: str) -> str:
    """Names of months as Python has them."""
    return text.replace("Sept", "Sep")


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Kolkata"])
def test_days_are_those_of_utc_wherever_one_looks(known: Callable[..., tuple[Any, Journal]], zone: str) -> None:
    page, journal = known(timezone_id=zone)
    first = NOW // DAY * DAY - 5 * DAY
    days = {"bucket": DAY, "rows": [period(first + i * DAY, 10 + i, 0.5, 1, 2) for i in range(6)]}
    none = {"count": 0, "by_code": [], "by_time": {"bucket": DAY, "rows": []}}
    written = redraw(page, journal, SUMMARY | {"by_time": days, "refusals": none})
    page.get_by_role("heading", name="Requests per day (UTC)").wait_for()
    dates = [datetime.fromtimestamp(first + i * DAY, UTC) for i in range(7)]  # the last one ends the axis
    assert said(page, "requests", "Home") == ["10", "0"]
    for date in dates[:6]:
        assert months(page.locator("#chart-requests .tip").inner_text()).startswith(date.strftime("%-d %b %Y UTC"))
        page.keyboard.press("ArrowRight")
    # What stands under the axis stands where its day begins.
    box = page.locator("#chart-requests .u-over").bounding_box()
    canvas = page.locator("#chart-requests canvas").bounding_box()
    ticks = [(text, x) for text, x in written("requests") if " " in text]
    assert len(ticks) >= 3
    for text, x in ticks:
        (day,) = [i for i, date in enumerate(dates) if date.strftime("%-d %b") == months(text)]
        assert x + canvas["x"] == pytest.approx(box["x"] + box["width"] * day / 6, abs=2)


@pytest.mark.parametrize("failed", [1, 0])
def test_axes_have_units_and_counts_are_whole(known: Callable[..., tuple[Any, Journal]], failed: int) -> None:
    page, journal = known()
    # One answer an hour, all or none of which failed; of two flags.
    rows = [period(HOUR - 3600 * i, 1, 0.5, 1, 0) | {"cancelled": 0, "errors": failed} for i in range(8)]
    none = {"count": 0, "by_code": [], "by_time": {"bucket": 3600, "rows": []}}
    written = redraw(page, journal, SUMMARY | {"by_time": {"bucket": 3600, "rows": rows[::-1]}, "refusals": none})

    def axis(chart: str) -> list[str]:
        return [text for text, _ in written(chart) if ":" not in text]

    assert set(axis("requests")) == set(axis("flags")) == {"0", "1"}
    assert axis("total") == ["0 ms", "1.00 s", "2.00 s"]
    assert axis("failures") == ["0 %", "50 %", "100 %"]


def test_a_number_between_unknown_ones_is_a_point(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known()
    first, size = NOW // 900 * 900 - 99 * 900, 900
    # Of a hundred periods, the first and the last, an isolated one, and two beside each other.
    rows = [period(first + i * size, 1, 0.5, 0, 0) for i in (0, 40, 60, 61, 99)]
    none = {"count": 0, "by_code": [], "by_time": {"bucket": size, "rows": []}}
    redraw(page, journal, SUMMARY | {"by_time": {"bucket": size, "rows": rows}, "refusals": none})
    columns = page.evaluate(
        """() => {
            const canvas = document.querySelector("#chart-attention canvas");
            const plot = document.querySelector("#chart-attention .u-over").getBoundingClientRect();
            const swatch = document.querySelector("#chart-attention .swatch");
            const [r, g, b] = getComputedStyle(swatch).backgroundColor.match(/[0-9.]+/g).map(Number);
            const left = Math.round(plot.left - canvas.getBoundingClientRect().left);
            const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const found = new Set();
            for (let x = left; x < width; x++)
                for (let y = 0; y < height; y++) {
                    const at = 4 * (y * width + x);
                    const far = Math.abs(data[at] - r) + Math.abs(data[at + 1] - g) + Math.abs(data[at + 2] - b);
                    if (data[at + 3] > 200 && far < 12) found.add(Math.round(100 * (x - left) / plot.width));
                }
            return [...found];
        }"""
    )
    assert all(any(abs(at - place) <= 1 for at in columns) for place in (0, 40, 60, 61, 99)), sorted(columns)
    assert all(min(abs(at - place) for place in (0, 40, 60, 61, 99)) <= 2 for at in columns), sorted(columns)
