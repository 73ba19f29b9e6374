"""A guard on the playground: what is sent, and that both answers, their numbers and the cost are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.server.web.browser import Visit
from tests.server.web.playing import DIAMOND, bodies_of, pick, send


def choose(page: Any, name: str, then: str) -> None:
    page.locator("#guard-row summary").click()
    page.locator("#guard-when").select_option(name)
    page.locator("#guard-then").select_option(then)


def test_a_guarded_answer_is_shown_with_all_tries_and_the_cost(playground: Callable[..., Visit]) -> None:
    visit = playground()
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, DIAMOND)
    plain = send(page)
    assert page.locator(".guarded").count() == 0
    choose(page, "attention_ratio", "toward the text")
    page.locator("#guard-sign").select_option("<=")
    page.locator("#guard-bound").fill("1")
    send(page)
    assert bodies[-1]["guard"] == {
        "when": {"attention_ratio": "<= 1"}, "then": {"steering": {"toward": "text"}}, "retries": 1,
    }  # fmt: skip
    report = page.locator("#answer .guarded")
    assert "the first answer was kept" in report.inner_text(), "the new answer has a ratio of at most 1, too"
    answers = report.locator("li")
    assert answers.count() == 2
    assert answers.nth(0).locator("q").inner_text().strip('“”"') == plain
    assert "attention ratio" in answers.nth(0).inner_text()
    assert "(met)" in answers.nth(0).inner_text()
    assert "kept" in answers.nth(0).inner_text()
    assert "tokens more" in report.inner_text()
    assert page.locator("#guard-truth").is_hidden()
    visit.check()


def test_a_kept_retry_replaces_what_was_streamed(playground: Callable[..., Visit]) -> None:
    visit = playground()
    page, bodies = visit.page, bodies_of(visit.page)
    pick(page, DIAMOND)
    page.locator("#helm").fill("-2")
    steered = send(page)
    page.locator("#helm").fill("0")
    plain = send(page)
    assert plain != steered
    chosen = page.evaluate("""async () => (await (await fetch("/v1/models")).json()).data[0].guard.conditions""")
    assert page.locator("#guard-when option").count() == 1 + len(chosen)
    # The plain answer's own number, which the steered one does not share.
    choose(page, "attention_ratio", "toward the text")
    page.locator("#guard-bound").fill("1")
    page.locator("#guard-sign").select_option("<=")
    send(page)
    ratio = bodies[-1]["guard"]["when"]
    assert ratio == {"attention_ratio": "<= 1"}
    numbers = page.locator("#answer .guarded li small").all_inner_texts()
    first, second = (float(text.split("attention ratio ")[1].split()[0]) for text in numbers)
    middle = (first + second) / 2
    page.locator("#guard-bound").fill(str(middle))
    page.locator("#guard-sign").select_option(">" if first > second else "<")
    shown = send(page)
    report = page.locator("#answer .guarded")
    assert "the new answer was kept" in report.inner_text()
    kept = report.locator("li.kept q").inner_text().strip('“”"')
    assert page.locator("#answer .text:visible").inner_text() == kept
    assert shown == kept
    visit.check()


def test_a_link_holds_the_guard(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, DIAMOND)
    page.locator("#asked-sage-see").check()
    choose(page, "alarm", "See")
    page.locator("#guard-truth").select_option("false")
    page.locator("#guard-retries").fill("2")
    page.wait_for_function("() => location.hash.includes('guard=')")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#guard-when")
    page.wait_for_function("() => document.querySelector('#guard-when').value === 'alarm'")
    assert page.locator("#guard-truth").input_value() == "false"
    assert page.locator("#guard-retries").input_value() == "2"
    assert page.locator("#guard-then").input_value() == "See"
    assert '"guard"' in page.locator("#code-text").text_content()
