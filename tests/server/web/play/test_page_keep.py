"""Conversations outlive a reload, can be gone back to, and are shared as links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.server.web.browser import Visit, until
from tests.server.web.playing import DIAMOND, GREEN, SAMPLES, pick, send, steer

FORM = """() => ({
    texts: ["system", "context", "question", "helm", "max-tokens", "temperature", "seed"].map(
        (id) => document.getElementById(id).value),
    checked: [...document.querySelectorAll("#form input:checked")].map((input) => input.id || input.value),
    kinds: [...document.querySelectorAll("#interventions select, #interventions input[type=number]")].map((i) => i.value),
    pictures: [...document.querySelectorAll("#tray img")].map((image) => image.src),
    turns: document.getElementById("turns").innerText,
})"""


def fill(page: Any) -> None:
    """Put something into every part of the form."""
    pick(page, GREEN)
    page.locator("#files").set_input_files([{"name": "own.png", "mimeType": "image/png", "buffer": OWN}])
    page.wait_for_selector("#tray li:nth-child(2)")
    steer(page, -0.7)
    page.locator("#system-row summary").click()
    page.locator("#system").fill("Answer in one word.")
    page.locator("#asked-sage-see").check()
    page.locator("#asked-sage-see-alpha").fill("0.3")
    page.locator("#asked-contrast").select_option("vcd")
    page.locator("#asked-contrast-alpha").fill("0.5")
    page.get_by_text("Sampling and readouts").click()
    page.locator("#seed").fill("7")
    page.locator("#temperature").fill("0.5")
    page.locator("#include input[value=residual]").uncheck()


OWN = (SAMPLES / "letter.png").read_bytes()


def settle(page: Any) -> None:
    """Wait until what was done last is kept, by a timer of the page's own, which goes off behind that which keeps."""
    page.evaluate("new Promise((done) => setTimeout(done, 400))")


def reload(page: Any) -> None:
    page.reload()
    page.wait_for_selector(".sample")
    settle(page)


def test_a_reload_keeps_the_form_and_the_answer(playground: Callable[..., Visit]) -> None:
    page = playground().page
    fill(page)
    answer = send(page)
    settle(page)
    before, map_ = page.evaluate(FORM), page.locator("#card-focus").inner_text()
    assert before["texts"][0] == "Answer in one word."
    assert len(before["pictures"]) == 2
    reload(page)
    page.wait_for_selector("#card-focus")
    assert page.evaluate(FORM) == before
    assert page.locator("#answer").inner_text().count(answer) == 1
    assert page.locator("#base").is_visible()
    assert page.locator("#card-focus").inner_text() == map_
    page.locator("#question").fill("What letter is in picture 2?")
    page.evaluate("dispatchEvent(new Event('pagehide'))")  # at once, not when it is calm
    reload(page)
    assert page.locator("#question").input_value() == "What letter is in picture 2?"


def test_a_page_that_is_left_at_once_loses_nothing(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    page.evaluate(RELOAD_WHEN, "#answers:not([hidden], [aria-busy])")
    with page.expect_event("load"):
        page.get_by_role("button", name="Send").click()
    page.wait_for_selector("#card-focus")
    answer = page.locator("#answer-words").inner_text()
    assert answer
    page.locator("#question").fill("What else?")
    page.evaluate(RELOAD_WHEN, "#tray li:nth-child(2)")
    with page.expect_event("load"):
        page.locator("#files").set_input_files([{"name": "own.png", "mimeType": "image/png", "buffer": OWN}])
    page.wait_for_selector("#card-focus")
    assert page.locator("#answer-words").inner_text() == answer
    assert page.locator("#question").input_value() == "What else?"
    pictures = page.locator("#tray img")
    assert [one.get_attribute("title") for one in pictures.all()] == ["cyan.png", "own.png"]
    assert page.locator("#error").is_hidden()


RELOAD_WHEN = """(selector) => new MutationObserver(() => document.querySelector(selector) && location.reload())
    .observe(document, { subtree: true, childList: true, attributes: true })"""
"""Reload the page in the moment in which a selector matches."""


def test_without_storage_everything_else_works(playground: Callable[..., Visit]) -> None:
    page = playground().page
    page.add_init_script(NO_STORAGE)
    page.reload()
    pick(page, GREEN)
    page.locator("#theme").click()
    assert send(page)
    settle(page)
    assert page.locator("#send").is_enabled()
    assert "What+color" in page.url
    reload(page)
    assert page.locator("#question").input_value() == "What color is the star?"  # by the address
    assert page.locator("#answers").is_hidden()


NO_STORAGE = """for (const name of ["sessionStorage", "localStorage", "indexedDB"])
    Object.defineProperty(window, name, { get() { throw new DOMException("Access is denied.", "SecurityError"); } });"""
"""A browser that blocks all cookies does this."""


def test_a_link_holds_everything_but_own_pictures(
    playground: Callable[..., Visit], visit: Callable[..., Visit]
) -> None:
    page = playground(permissions=["clipboard-read", "clipboard-write"]).page
    fill(page)
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Your own images are not in the link.").wait_for()
    link = page.evaluate("navigator.clipboard.readText()")
    settle(page)
    assert link == page.url
    assert "base64" not in link
    said = parse_qs(urlsplit(link).fragment)
    assert (said["pictures"], said["strength"], said["seed"]) == (["cyan.png,*"], ["-0.7"], ["7"])

    mine = page.evaluate(FORM)
    other = visit().page  # in another browser
    other.goto(link)
    other.wait_for_selector("#tray li")
    other.get_by_text("One image is not in the link: add it.").wait_for()
    got = other.evaluate(FORM)
    assert got == {**mine, "pictures": mine["pictures"][:1]}


def test_a_link_that_is_nonsense_does_no_harm(playground: Callable[..., Visit]) -> None:
    opened = playground()
    opened.expected = ("404",)
    page = opened.page
    base = page.url
    for fragment in ("#results", "#strength=much&asked={", "#turns=[{&pictures=../secret.png&question=hi&readouts=x"):
        page.goto("about:blank")
        page.goto(base + fragment)
        page.wait_for_selector(".sample")
        settle(page)
        assert page.locator("#helm").input_value() == "0"
        assert page.locator("#tray li").count() == 0
    assert page.locator("#question").input_value() == "hi"
    assert send(page)


def test_what_was_asked_before_is_gone_back_to(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    page.locator("#asked-sage-see").check()
    first = send(page)
    page.get_by_role("button", name="New").click()
    assert page.locator("#question").input_value() == ""
    assert page.locator("#answers").is_hidden()
    assert page.locator("#tray li").count() == 0
    pick(page, DIAMOND)
    steer(page, 0)
    second = send(page)
    settle(page)
    page.get_by_role("button", name="History").click()
    rows = page.locator("#history-list button")
    until(page, "document.querySelectorAll('#history-list button').length === 2")
    assert second in rows.nth(0).inner_text()
    assert ["toward the image, 1 · See · " in row for row in rows.all_inner_texts()] == [False, True]
    rows.nth(1).click()
    until(page, "document.getElementById('helm').value === '1'")
    assert page.locator("#question").input_value() == "What color is the star?"
    assert page.locator("#answer").inner_text().count(first) == 1
    assert page.locator("#views figure").count() == 1
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Forget all").click()
    page.get_by_text("Nothing yet.").wait_for()
    assert page.evaluate("indexedDB.databases().then((all) => all.length)") >= 1


def test_a_conversation_goes_on_with_what_was_said(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    first = send(page)
    page.get_by_role("button", name="Follow up").first.click()
    assert page.locator("#turns li").count() == 1
    assert page.locator("#tray li").count() == 0
    page.locator("#system-row summary").click()
    page.locator("#system").fill("Be brief.")
    page.locator("#question").fill("And where is it?")
    with page.expect_request("**/v1/chat/completions") as caught:
        send(page)
    messages = caught.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[0]["content"] == "Be brief."
    assert messages[1]["content"][0]["type"] == "image_url"
    assert messages[2]["content"] == first
    assert messages[3]["content"] == [{"type": "text", "text": "And where is it?"}]
    assert page.locator("#views figure").count() == 1  # the earlier turn's picture, that this answer looked at too
    settle(page)
    reload(page)
    assert page.locator("#turns li").count() == 1
    page.get_by_role("button", name="Remove turn 1").click()
    assert page.locator("#turns-section").is_hidden()
