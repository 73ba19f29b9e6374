"""Pictures are added to the playground by hand, dropped and pasted, ordered and removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from tests.server.web.browser import Visit, drop
from tests.server.web.playing import SAMPLES, encoded, send


def test_pictures_are_added_ordered_and_removed(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    names = ("cyan.png", "gray.png", "letter.png")
    page.locator("#files").set_input_files([SAMPLES / name for name in names])
    page.wait_for_selector("#tray li:nth-child(3)")

    def order() -> list[str]:
        return [
            alt.partition(": ")[2] for alt in page.locator("#tray img").evaluate_all("all => all.map((i) => i.alt)")
        ]

    assert order() == list(names)
    page.get_by_role("button", name="Move image 3 forward").click()
    page.get_by_role("button", name="Remove image 1").click()
    assert order() == ["letter.png", "gray.png"]
    page.evaluate(
        """async (url) => {
            const blob = await (await fetch(url)).blob();
            const data = new DataTransfer();
            data.items.add(new File([blob], "dropped.png", { type: "image/png" }));
            document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }""",
        "/samples/cyan.png",
    )
    page.wait_for_selector("#tray li:nth-child(3)")
    page.locator("#question").fill("What letter is in picture 1?")
    page.locator("#files").set_input_files([{"name": "no.png", "mimeType": "image/png", "buffer": b"not a picture"}])
    page.get_by_text("no.png cannot be read as an image").wait_for()
    with page.expect_request("**/v1/chat/completions") as caught:
        assert send(page) == "The letter is K."
    sent = [part["image_url"]["url"] for part in caught.value.post_data_json["messages"][0]["content"][:-1]]
    expected = [encoded(SAMPLES / name) for name in ("letter.png", "gray.png", "cyan.png")]
    assert [url.partition(",")[2] for url in sent] == expected
    assert page.locator("#views figure").count() == 3


def middle(page: Any, selector: str) -> tuple[float, float]:
    """Return the point in the middle of an element."""
    box = page.locator(selector).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.mark.parametrize("where", ["#drop", "#question", "#results", "header.top"])
def test_a_picture_is_taken_wherever_it_is_dropped_and_the_page_stays(
    playground: Callable[..., Visit], where: str
) -> None:
    page = playground().page
    page.locator("#context").fill("half a sentence")
    address = page.url
    drop(page, [SAMPLES / "letter.png"], *middle(page, where))
    page.wait_for_selector("#tray li")
    assert page.url.partition("#")[0] == address
    assert page.locator("#context").input_value() == "half a sentence"
    assert page.locator("#tray img").get_attribute("alt") == "Image 1: letter.png"
    assert page.locator("#drop.over").count() == 0


def test_the_box_shows_where_a_held_picture_goes(playground: Callable[..., Visit]) -> None:
    page = playground().page
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(SAMPLES / "letter.png")], "dragOperationsMask": 1}
    x, y = middle(page, "#results")

    for kind in ("dragEnter", "dragOver"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
    page.wait_for_selector("#drop.over")
    page.evaluate("document.body.dispatchEvent(new DragEvent('dragleave', { bubbles: true }))")  # out of the window
    page.wait_for_selector("#drop:not(.over)")


def test_what_is_dropped_and_is_no_picture_is_refused_by_name(playground: Callable[..., Visit], tmp_path: Path) -> None:
    page = playground().page
    address = page.url
    (tmp_path / "notes.txt").write_text("no picture")
    drop(page, [tmp_path / "notes.txt"], *middle(page, "#results"))
    page.get_by_text("notes.txt cannot be read as an image").wait_for()
    assert page.url.partition("#")[0] == address
    assert page.locator("#tray li").count() == 0


def test_text_dropped_into_a_field_is_the_browsers_and_a_link_beside_it_is_nobodys(
    playground: Callable[..., Visit],
) -> None:
    page = playground().page
    address = page.url
    session = page.context.new_cdp_session(page)
    items = [{"mimeType": "text/plain", "data": "http://127.0.0.1:9/"}]
    links = [*items, {"mimeType": "text/uri-list", "data": "http://127.0.0.1:9/"}]
    for given, where in ((links, "#results"), (items, "#question")):
        x, y = middle(page, where)
        for kind in ("dragEnter", "dragOver", "drop"):
            data = {"items": given, "files": [], "dragOperationsMask": 1}
            session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
        page.wait_for_timeout(300)
    assert page.url.partition("#")[0] == address
    assert page.locator("#question").input_value() == "http://127.0.0.1:9/"
    assert page.locator("#tray li").count() == 0


PASTE = """async ({ target, text, url }) => {
    const data = new DataTransfer();
    if (text !== null) data.setData("text/plain", text);
    const blob = await (await fetch(url)).blob();
    data.items.add(new File([blob], "pasted.png", { type: "image/png" }));
    const event = new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    return document.querySelector(target).dispatchEvent(event);
}"""


@pytest.mark.parametrize(
    ("target", "text", "pictures"),
    [("#question", None, 1), ("body", "copied cells", 1), ("#question", "copied cells", 0), ("#context", "words", 0)],
)
def test_copied_text_with_a_picture_of_it_is_pasted_into_a_field_as_text(
    playground: Callable[..., Visit], target: str, text: str | None, pictures: int
) -> None:
    page = playground().page
    left_to_the_browser = page.evaluate(PASTE, {"target": target, "text": text, "url": "/samples/cyan.png"})
    assert left_to_the_browser is (pictures == 0)
    if pictures:
        page.wait_for_selector("#tray li")
    page.wait_for_timeout(300)
    assert page.locator("#tray li").count() == pictures
