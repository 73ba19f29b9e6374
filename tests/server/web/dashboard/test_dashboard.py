"""The dashboard in a real browser: over a real journal, and over rows whose numbers the test knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.journal.words import WORDED
from server.settings import Settings
from tests.server.conftest import data_uri, user
from tests.server.fakes import FakeEngine, checkpoint
from tests.server.web import known_journal
from tests.server.web.browser import Visit, drop, eventually, until
from tests.server.web.known_journal import NOW, ROWS, SUMMARY, VECTOR, Journal, row


@pytest.fixture
def url(live: Callable[[Flask], str]) -> str:
    """Return the dashboard's URL on a server that only has to serve the page."""
    return live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/dashboard"  # type: ignore[arg-type]


@pytest.fixture
def known(visit: Callable[..., Visit], url: str) -> Callable[..., tuple[Any, Journal]]:
    """Open the dashboard over the known rows."""

    def begin(query: str = "", **options: Any) -> tuple[Any, Journal]:
        page = visit(now=NOW, **options).page
        journal = Journal(page)
        page.goto(url + query)
        page.wait_for_selector("#content:not([hidden])")
        return page, journal

    return begin


def test_figures_and_charts_show_the_summary(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, _ = known()
    tiles = page.locator("#tiles .tile").all_inner_texts()
    assert tiles[0].split("\n") == ["Answers", "1,234", "34 incomplete"]
    assert tiles[1].split("\n")[:2] == ["Refused", "7"]
    assert tiles[2].split("\n")[1] == "0.250"
    assert tiles[3].split("\n")[1:] == ["90 %", "45 of 50"]
    assert tiles[4].split("\n")[1:] == ["15 %", "IVM, 6 of 40"]
    assert tiles[5].split("\n")[1:] == ["1.5 %", "3 of 200"]
    assert tiles[6].split("\n")[1:] == ["–", "not known"]
    assert tiles[7].split("\n") == ["Guards acted", "10 %", "10 of 100 answers; 6 replaced"]
    assert tiles[8].split("\n")[1:] == ["250 ms", "90 % within 370 ms"]
    table = page.locator("#chart-interventions tbody tr").all_inner_texts()
    assert table[0].split("\t") == ["plain", "1,000", "0.200", "90 %", "-0.010", "90 %"]
    assert table[1].split("\t") == ["toward text", "234", "0.100", "–", "–", "–"]
    refused = page.locator("#chart-refusals tbody tr").all_inner_texts()
    assert refused[0].split("\t") == ["rate limit exceeded", "5", "429", "/v1/chat/completions"]
    spread = page.locator("#chart-spread dt").all_inner_texts()
    assert len(spread) == 7  # not the dose, of which there is none
    left = page.locator("#chart-spread .box-median").first.evaluate(
        "e => (e.offsetLeft + 1.5) / e.parentElement.clientWidth"
    )
    assert left == pytest.approx((0.25 - 0.1) / (0.4 - 0.1), abs=0.03)


def test_rows_page_and_open(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known()
    lines = page.locator("#rows tr")
    assert lines.count() == 2
    assert [text.strip() for text in lines.nth(1).locator("td").all_inner_texts()[1:]] == [
        "text 1.50", "stop", "2", "0.200", "image 1 75 % right", "-0.010", "dissociated", "2", "20 ms", "250 ms",
    ]  # fmt: skip
    assert page.locator("#dots circle").count() == 2
    assert page.locator("#dots circle.raised").count() == 1
    page.get_by_role("button", name="Older").click()
    page.get_by_text("page 2").wait_for()
    assert journal.queries[-1]["before"] == "cursor-2"
    assert lines.nth(0).locator("td").nth(1).inner_text().split() == ["See", "Generate", "guard:", "retry"]
    assert page.get_by_role("button", name="Older").is_disabled()
    dialog = page.get_by_role("dialog")
    lines.nth(0).click()
    dialog.wait_for()
    shown = dialog.inner_text()
    assert "scale, alpha 0.070 on average, image share 10 % to 20 %" in shown
    assert "20 % of the updates damped, mean divergence 12.5" in shown
    assert "masked patches of image 1: 1, image 3: 2 (pixels), changed 1 token" in shown
    page.keyboard.press("Escape")
    lines.nth(1).click()  # of this one the journal kept little
    dialog.get_by_text("chatcmpl-4").first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Newer").click()
    page.get_by_text("page 1").wait_for()

    lines.nth(1).click()
    dialog.wait_for()
    shown = dialog.inner_text()
    assert "toward text, strength 1.50, layer 3, 7 tokens, dose 0.500" in shown
    assert "<i>seven</i>" in shown
    assert "<script>alert(1)</script>" in shown
    assert dialog.locator("i, script").count() == 0
    assert page.url.endswith("#chatcmpl-2")
    dialog.get_by_text("Raw JSON").click()
    raw = dialog.locator(".raw pre", has_text="diagnostics.row")
    raw.wait_for()  # it is written when the disclosure has opened, which is after the click
    assert json.loads(raw.text_content()) == ROWS[1]
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "#" not in url)  # which it hears of after it is closed
    assert dialog.is_hidden()

    page.locator(".row-open").first.focus()  # and by keyboard
    page.keyboard.press("Enter")
    dialog.wait_for()
    assert "chatcmpl-1" in dialog.inner_text()
    dialog.get_by_role("button", name="Close").click()
    assert dialog.is_hidden()


def test_what_was_asked_for_automatically_is_shown_as_it_was_applied(
    known: Callable[..., tuple[Any, Journal]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"steering": {"toward": "auto"}}
    found = [
        row(number, interventions=["steering"], asked=asked, applied={"steering": [VECTOR | {"toward": toward}]})
        for number, toward in enumerate(("text", "vision", None), 1)
    ]
    monkeypatch.setattr(known_journal, "ROWS", found)
    page, _ = known()
    lines = page.locator("#rows tr")
    assert lines.nth(0).locator("td").nth(1).inner_text() == "auto: text 1"
    assert lines.nth(1).locator("td").nth(1).inner_text() == "auto: vision 1"
    assert page.locator("#dots .key").all_inner_texts() == ["toward vision", "toward text"]
    page.get_by_role("button", name="Older").click()
    page.get_by_text("page 2").wait_for()
    assert lines.nth(0).locator("td").nth(1).inner_text() == "auto: not steered"
    assert page.locator("#dots .key").all_inner_texts() == ["plain"]


def test_rows_of_what_the_page_has_never_heard_of(
    known: Callable[..., tuple[Any, Journal]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"toys": {"nudge": True, "shade": {"kind": "red"}}, "contrast": {"kind": "vcd"}, "steering": None}
    applied = {"toys": {"nudge": {"steps": 2}, "shade": {"kind": "red", "alpha": 0.5}}}
    toy = row(1, interventions=["toys.nudge", "toys.shade.red"], asked=asked, applied=applied)
    toy["diagnostics"] |= {"norm": 2.5, "odd": True, "even": False, "none_such": None, "correct": None}
    contrasted = row(2, interventions=["toys.nudge", "contrast.vcd"], asked=asked)
    monkeypatch.setattr(known_journal, "ROWS", [toy, contrasted])
    page, _ = known()
    cells = page.locator("#rows tr").nth(0).locator("td")
    assert cells.nth(1).inner_text().split() == ["Nudge", "RED"]
    assert cells.nth(7).inner_text() == "odd"
    assert page.locator("#rows tr").nth(1).locator("td").nth(1).inner_text().split() == ["Nudge", "VCD"]
    assert page.locator("#dots .key").all_inner_texts() == ["contrast", "other"]
    cells.nth(1).click()
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    shown = dialog.locator("dl.numbers").first.locator("div").all_inner_texts()
    assert shown[-4:] == ["norm\n2.50", "odd\nyes", "even\nno", "none such\n–"]
    assert dialog.locator("dl.applied div").all_inner_texts() == ["Nudge\nsteps 2", "RED\nalpha 0.500"]


def test_a_row_is_opened_by_its_address(known: Callable[..., tuple[Any, Journal]], visit: Callable[..., Visit]) -> None:
    page, _ = known("#chatcmpl-2")
    page.get_by_role("dialog").wait_for()
    assert "The star is red." in page.get_by_role("dialog").inner_text()


def test_filters_live_in_the_address(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known("?range=7d&toward=text&flag=nonsense")
    first = journal.summaries()[0]
    assert first.keys() == {"path", "since", "toward"}
    assert first["toward"] == "text"
    assert float(first["since"]) == pytest.approx(NOW - 7 * 86400, abs=60)
    page.get_by_role("combobox", name="SAGE").select_option("see")
    page.get_by_role("combobox", name="Contrast").select_option("none")
    page.get_by_role("combobox", name="Intervention").select_option("sage.think")
    page.get_by_label("Finish").select_option("length")
    page.get_by_role("combobox", name="Flag").select_option("dissociation")
    page.get_by_label("Model").fill("demo")
    page.get_by_label("Model").press("Enter")
    page.get_by_text("All", exact=True).click()
    until(page, "location.search.includes('range=all')")
    expected = {"range": "all", "model": "demo", "toward": "text", "sage": "see", "contrast": "none",
                "intervention": "sage.think", "flag": "dissociation", "finish_reason": "length"}  # fmt: skip
    assert {name: value for name, (value,) in parse_qs(urlsplit(page.url).query).items()} == expected
    asked = {"path": "/v1/diagnostics/summary", **{n: v for n, v in expected.items() if n != "range"}}
    eventually(page, lambda: journal.summaries()[-1] == asked)
    page.get_by_role("button", name="Clear").click()
    until(page, "location.search === '?range=all'")
    page.reload()
    assert page.locator('input[name="range"]:checked').get_attribute("value") == "all"


def test_filters_offer_the_words_that_the_server_knows(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, _ = known()
    for name, words in WORDED.items():
        offered = page.locator(f"#filters select[name={name}] option")
        assert offered.evaluate_all("all => all.map((one) => one.value)") == ["", *words.allowed()]


def test_it_refreshes_until_paused(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known()
    kinds = [{"status": 400, "code": f"kind_{i}", "route": "/v1/chat/completions", "count": 40 - i} for i in range(15)]
    journal.summary = {**SUMMARY, "count": 1300, "refusals": {**SUMMARY["refusals"], "by_code": kinds}}
    page.get_by_text("1,300").wait_for()
    page.get_by_text("and 3 more kinds: 81 requests").wait_for()  # 28 + 27 + 26
    page.get_by_role("button", name="Pause").click()
    page.get_by_text("Paused").wait_for()
    count = len(journal.queries)
    page.wait_for_timeout(5000)
    assert len(journal.queries) == count
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("Live", exact=True).wait_for()
    assert len(journal.queries) == count + 2


def test_empty_journals_say_so(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, journal = known()
    journal.summary = {**SUMMARY, "count": 0, "refusals": {**SUMMARY["refusals"], "count": 0}}
    page.get_by_label("Toward").select_option("vision")
    page.get_by_text("No answer matches these filters").wait_for()
    assert page.locator("#content").is_hidden()
    page.get_by_role("button", name="Clear filters").click()
    page.get_by_text("No answers in this time").wait_for()
    page.get_by_role("button", name="Show all time").click()
    page.get_by_text("The journal is empty").wait_for()
    journal.summary = SUMMARY
    page.wait_for_selector("#content:not([hidden])")


def test_a_journal_that_is_off_says_so(visit: Callable[..., Visit], url: str) -> None:
    opened = visit()
    opened.expected = ("503",)
    opened.page.goto(url)
    opened.page.get_by_text("The journal is off").wait_for()
    assert opened.page.locator("#status").inner_text() == "Journal off"
    assert opened.page.locator("#filters").is_hidden()


def test_the_key_is_asked_for(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    settings = Settings(api_keys=("sk-0123456789",), journal="off")  # type: ignore[arg-type]
    opened = visit()
    opened.expected = ("401", "503")
    opened.page.goto(live(create_app(settings, engine=FakeEngine())) + "/dashboard")  # type: ignore[arg-type]
    opened.page.get_by_label("This server requires an API key.").fill("sk-0123456789")
    opened.page.keyboard.press("Enter")
    opened.page.get_by_text("The journal is off").wait_for()
    assert opened.page.locator("#key-form").is_hidden()


@pytest.mark.parametrize("point", [(640, 500), (640, 90)])
def test_a_file_that_is_dropped_leaves_the_page(
    known: Callable[..., tuple[Any, Journal]], point: tuple[int, int]
) -> None:
    page, _ = known()
    address = page.url
    page.evaluate(
        """() => {
            window.refused = [];
            for (const kind of ["dragover", "drop"])
                window.addEventListener(kind, (event) => window.refused.push(event.defaultPrevented));
        }"""
    )
    drop(page, [checkpoint() / "samples" / "cyan.png"], *point)
    assert page.url == address
    refused = page.evaluate("window.refused")  # what is not refused a browser with windows opens
    assert refused
    assert all(refused)


def test_errors_and_unknown_rows_are_told(visit: Callable[..., Visit], url: str) -> None:
    opened = visit(now=NOW)
    opened.expected = ("404",)
    Journal(opened.page)
    opened.page.goto(url + "#chatcmpl-none")
    opened.page.get_by_text("The journal holds no answer with this id.").wait_for()
    opened.page.wait_for_selector("#content:not([hidden])")
    assert opened.page.locator("#problem").is_visible()  # a refresh that goes well does not take it away
    assert "#" not in opened.page.url
    opened.page.locator("#rows tr").first.click()
    opened.page.get_by_role("dialog").wait_for()
    assert opened.page.locator("#problem").is_hidden()


def test_a_phone_needs_no_sideways_scrolling(known: Callable[..., tuple[Any, Journal]]) -> None:
    page, _ = known(viewport={"width": 360, "height": 780})
    fits = "document.documentElement.scrollWidth <= window.innerWidth"
    assert page.evaluate(fits)
    page.locator("#rows tr").nth(1).click()
    page.get_by_role("dialog").wait_for()
    assert page.evaluate(fits)
    assert page.evaluate("document.querySelector('dialog').scrollWidth <= document.querySelector('dialog').clientWidth")


@pytest.fixture
def journalled(engine: steering.Engine, tmp_path: Path) -> Iterator[Flask]:
    """Yield an application of the embedded model with a journal."""
    settings = Settings(vectors=(), slots=4, max_waiting=8, journal=str(tmp_path / "journal.db"), journal_texts=True)  # type: ignore[arg-type]
    app = create_app(settings, engine=engine)
    yield app
    app.extensions["helmsight"].journal.close()


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_label_is_broken_or_cut(known: Callable[..., tuple[Any, Journal]], width: int) -> None:
    page, _ = known(viewport={"width": width, "height": 800})
    until(page, "document.getElementById('status').textContent === 'Live'")
    cut = "[...document.querySelectorAll('#status, .segments span')].filter((e) => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(f"{cut}.map((e) => e.textContent)") == []
    lines = page.evaluate("[...document.querySelectorAll('.segments span')].map((e) => e.offsetHeight)")
    assert max(lines) < 2 * 13 * 1.5  # of two lines of its letters
    page.locator("#rows tr").first.click()
    page.get_by_role("dialog").wait_for()  # with the row's own title, which the next line replaces
    page.evaluate("document.getElementById('detail-title').textContent = 'chatcmpl-' + 'f'.repeat(32)")  # as real ones
    title, close = page.locator("#detail-title").bounding_box(), page.locator("#close").bounding_box()
    assert close["y"] < title["y"] + title["height"]  # beside each other


def test_real_answers_arrive_and_are_filtered(
    journalled: Flask, live: Callable[[Flask], str], visit: Callable[..., Visit]
) -> None:
    client = journalled.test_client()

    def ask(**fields: Any) -> str:
        body = {
            "messages": [user(data_uri(), data_uri(), "What color is the background in picture 2?")],
            "max_tokens": 6,
        }
        answer = client.post("/v1/chat/completions", json={**body, "diagnostics": True, **fields}, buffered=True)
        assert answer.status_code == 200, answer.text
        return str(answer.json["id"])  # type: ignore[index]

    page = visit().page
    page.goto(live(journalled) + "/dashboard?range=all")
    page.get_by_text("The journal is empty").wait_for()
    ask()
    steered = ask(steering={"toward": "text"}, metadata={"run": "7"})
    ask(sage={"see": True, "think": False, "generate": False})
    until(page, "document.querySelectorAll('#rows tr').length === 3")
    assert page.locator("#tiles .tile b").first.inner_text() == "3"
    page.get_by_label("Toward").select_option("text")
    until(page, "document.querySelectorAll('#rows tr').length === 1")
    page.locator("#rows tr").click()
    shown = page.get_by_role("dialog")
    shown.wait_for()
    text = shown.inner_text()
    assert steered in text
    assert "toward text, strength 1 (0.500 in published units), layer 3" in text
    assert "What color is the background in picture 2?" in text
    assert "run" in text
    page.get_by_role("link", name="Open in the playground").click()
    page.wait_for_selector(".sample")
    until(page, "document.getElementById('helm').value === '-1'")
    assert page.locator("#question").input_value() == "What color is the background in picture 2?"
    assert page.locator("#max-tokens").input_value() == "6"
