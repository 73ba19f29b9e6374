"""What the dashboard shows over time: read by keys and pointer, and zoomed, over periods that the test knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web import known_journal
from tests.server.web.browser import Visit, until
from tests.server.web.known_journal import HOUR, NOW, Journal, row


@pytest.fixture
def known(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> Callable[..., tuple[Any, Journal]]:
    """Open the dashboard over the known rows, which are of hours."""
    url = live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/dashboard"  # type: ignore[arg-type]

    def begin(query: str = "") -> tuple[Any, Journal]:
        page = visit(timezone_id="UTC", locale="en-GB").page
        journal = Journal(page)
        page.goto(url + query)
        page.wait_for_selector("#chart-total canvas")
        return page, journal

    return begin


def read(page: Any, chart: str, key: str) -> str:
    """What is said of the period that a key leads to."""
    page.locator(f"#chart-{chart} .plot").focus()
    page.keyboard.press(key)
    page.wait_for_timeout(60)
    return str(page.locator(f"#chart-{chart} .tip").inner_text())


def said(page: Any, chart: str, *keys: str) -> list[str]:
    """The numbers alone, in the order of the legend."""
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
    asked = [query for query in journal.queries if query["path"].endswith("/summary")][-1]
    assert (asked["since"], asked["until"], asked["toward"]) == (given["since"], given["until"], "text")
    page.get_by_role("button", name="Whole time").click()
    until(page, "location.search === '?toward=text'")


def test_a_part_stands_in_the_address(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known(f"?since={HOUR - 7200}&until={HOUR}")
    assert (journal.queries[0]["since"], journal.queries[0]["until"]) == (str(HOUR - 7200), str(HOUR))
    page.get_by_text("15 min", exact=True).click()
    until(page, "location.search === '?range=15m'")
    page.wait_for_timeout(300)
    asked = [query for query in journal.queries if query["path"].endswith("/summary")][-1]
    assert asked.keys() == {"path", "since"}
    assert float(asked["since"]) == pytest.approx(NOW - 900, abs=5)


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


def test_a_row_leads_to_the_playground(
    known: Callable[..., tuple[Any, Journal]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "system: Be brief.\nuser: What?\nassistant: A star.\nuser: Text context: It is red.\n\nWhich colour?"
    asked = {
        "steering": {"toward": "text", "strength": 1.5},
        "sage": {"think": False},
        "contrast": {"kind": "icd", "prompt": "(14 characters)"},
        "baseline": False,
        "diagnostics": {"include": ["attention", "focus"]},
    }
    sampling = {"temperature": 0.5, "max_tokens": 9, "seed": 3, "n": 1, "top_p": 1.0}
    full = row(1, asked=asked, sampling=sampling, texts={"prompt": prompt, "answer": "Red."})
    monkeypatch.setattr(known_journal, "ROWS", [full, row(2, asked={"omitted": 9}, images=0)])
    page, _ = known()
    links = []
    for line in page.locator("#rows tr").all():
        line.click()
        links.append(page.get_by_role("link", name="Open in the playground").get_attribute("href"))
        page.keyboard.press("Escape")
    full_of, bare = ({n: v for n, (v,) in parse_qs(link.partition("#")[2], True).items()} for link in links)
    turns, others = json.loads(full_of.pop("turns")), json.loads(full_of.pop("asked"))
    assert full_of == {
        "question": "Which colour?", "context": "It is red.", "system": "Be brief.", "pictures": "*,*", "strength": "-1.5",
        "max_tokens": "9", "temperature": "0.5", "seed": "3", "baseline": "0", "readouts": "attention,focus",
    }  # fmt: skip
    assert turns == [{"context": "", "question": "What?", "answer": "A star.", "pictures": ""}]
    assert others == {"sage": {"think": False}, "contrast": {"kind": "icd"}}
    assert bare == {"max_tokens": "8", "readouts": ""}
