"""The playground in a real browser against a real server."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.process.local import adapted
from server.process.runtime import Runtime, Serving
from server.settings import Settings
from tests.server.fakes import FakeEngine, checkpoint
from tests.server.web.browser import Visit, drop, until

GREEN, DIAMOND, TWO = "The text says green", "The text says diamond", "One of two pictures"
SAMPLES = checkpoint() / "samples"


@pytest.fixture(scope="module")
def demo(engine: steering.Engine) -> Flask:
    """The embedded model with its own vector, without a journal."""
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


def pick(page: Any, title: str) -> None:
    """Take a sample scene."""
    page.get_by_role("button", name=title).click()
    page.wait_for_selector("#tray li")


def steer(page: Any, strength: float) -> None:
    """Put the helm somewhere: negative is toward text."""
    page.locator("#helm").fill(str(strength))


def send(page: Any) -> str:
    """Send the form and wait for the whole answer."""
    page.get_by_role("button", name="Send").click()
    page.wait_for_selector("#answers:not([aria-busy])")
    return str(page.locator("#answer-live").text_content())


def asked(demo: Flask, page: Any) -> Any:
    """The first choice of the server's answer to the request that the page shows as curl, with the samples' pictures."""
    text = page.locator("#code-text").text_content()
    body = text[text.index("<<EOF\n") + 6 : text.rindex("\nEOF")].replace("\\\\", "\\")
    sample = next(s for s in json.loads((SAMPLES / "samples.json").read_text()) if s["title"] == picked(page))
    for i, name in enumerate(sample["images"], 1):
        body = body.replace(f"$(base64 < image{i}.png | tr -d '\\n')", encoded(SAMPLES / name))
    response = demo.test_client().post("/v1/chat/completions", json=json.loads(body))
    assert response.status_code == 200, response.text
    return response.json["choices"][0]  # type: ignore[index]


def picked(page: Any) -> str:
    return str(page.locator('.sample[aria-pressed="true"]').inner_text().strip())


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def heat(page: Any, image: int) -> list[float]:
    """The overlay of a picture, cell by cell on a 3 x 3 grid: mean brightness at each cell's centre."""
    return page.evaluate(  # type: ignore[no-any-return]
        """(image) => {
            const canvas = document.querySelector(`canvas[data-image="${image}"]`), side = canvas.width / 3;
            return [...Array(9).keys()].map((i) => {
                const [x, y] = [(i % 3) * side + side / 2, Math.floor(i / 3) * side + side / 2];
                const at = canvas.getContext("2d").getImageData(x, y, 1, 1).data;
                return (at[0] + at[1] + at[2]) * at[3];
            });
        }""",
        image,
    )


def highest(values: list[float]) -> int:
    return values.index(max(values))


# ------------------------------------------------------------------------------------------------ in a browser


def test_a_whole_round_shows_what_the_server_says(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    assert page.locator("#helm-value").text_content() == "1.0 toward vision"
    answer = send(page)
    choice = asked(demo, page)
    assert answer == choice["message"]["content"] == "The star is yellow."
    assert page.locator("#base-text").text_content() == choice["baseline"]["message"]["content"] == "The star is green."
    assert page.locator("#look").is_visible()
    said = choice["diagnostics"]

    # The line of sigma has the server's values: heights above the axis are in their proportion.
    drawn = page.locator('#card-focus .line[data-name="picture 1"] circle').evaluate_all(
        "dots => dots.map((dot) => Number(dot.getAttribute('cy')))"
    )
    sigma = [row[0] for row in said["focus"]["sigma"]]
    assert len(drawn) == len(sigma) == 8
    top = highest(sigma)
    floor = max(drawn) + sigma[drawn.index(max(drawn))] / (max(sigma) - min(sigma)) * (max(drawn) - min(drawn))
    for y, value in zip(drawn, sigma, strict=True):
        assert (floor - y) / (floor - drawn[top]) == pytest.approx(value / sigma[top], abs=0.02)

    # The bar has the server's ratio, and what was applied is told in words.
    assert f"{100 * said['modality']['attention_ratio']:.1f} %" in page.locator("#card-modality").inner_text()
    dose = choice["applied"]["steering"][0]["dose"]
    assert (
        f"toward vision, strength 1 (0.500 in published units), layer 3, 38 tokens, dose {dose:.3f}"
        in page.locator("#card-applied").inner_text()
    )
    assert page.locator("#card-decay .line").count() == 4
    assert page.locator("#card-residual .chart svg").count() == 9
    assert page.locator("#card-flags .chip").all_text_contents() == [
        "raised" if said["flags"][name] else "clear" for name in ("perceptual_blindness", "dissociation")
    ]
    page.get_by_text("Raw JSON").click()
    raw = page.locator("#card-applied pre", has_text="diagnostics")
    raw.wait_for()  # it is written when the disclosure has opened, which is after the click
    assert json.loads(raw.text_content())["diagnostics"] == said


def test_heat_maps_are_brightest_where_the_server_says(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, TWO)
    send(page)
    choice = asked(demo, page)
    page.locator("#smooth").uncheck()
    one, two = choice["diagnostics"]["patches"]
    for layer in (3, 5):
        page.locator("#layer").fill(str(one["layers"].index(layer) + 1))
        assert page.locator("#layer-value").text_content() == str(layer)
        maps = [image["rho"][image["layers"].index(layer)] for image in (one, two)]
        bright = heat(page, 1) + heat(page, 2)
        assert highest(bright) == highest(maps[0] + maps[1])
        order = sorted(range(18), key=(maps[0] + maps[1]).__getitem__)
        assert all(bright[a] <= bright[b] + 1e-6 for a, b in pairwise(order))
    assert page.locator(".view.focused").inner_text().startswith("Picture 2\nfocused")

    page.locator("#opacity").fill("0")
    assert heat(page, 1) == [0.0] * 9
    page.locator("#opacity").fill("50")
    page.locator("#smooth").check()
    smooth = page.evaluate(
        "new Set(document.querySelector('canvas[data-image=\"2\"]').getContext('2d').getImageData(0, 28, 168, 1).data).size"
    )
    assert smooth > 9


def test_a_word_shows_its_own_map(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    send(page)
    page.locator("#smooth").uncheck()
    said = asked(demo, page)["diagnostics"]
    attention = heat(page, 1)
    words = page.locator("#answer-words .word")
    assert words.all_text_contents() == ["The", "star", "is", "yellow."]
    for word in ("star", "yellow"):
        words.filter(has_text=word).hover()
        (map_,) = [entry["map"] for entry in said["tam"] if entry["token"].strip() == word]
        assert highest(heat(page, 1)) == highest(map_)
        assert f"“{word}" in page.locator("#look-note").inner_text()
    assert heat(page, 1) != attention
    page.mouse.move(5, 5)
    assert heat(page, 1) == attention
    words.filter(has_text="star").click()  # kept after the pointer leaves
    page.mouse.move(5, 5)
    assert heat(page, 1) != attention
    page.get_by_text("Baseline", exact=True).nth(1).click()
    assert page.locator("#whose input:checked").get_attribute("value") == "baseline"


def test_text_is_followed_where_the_helm_says_so(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, DIAMOND)
    plain = send(page)
    assert plain == "The green object is a triangle."
    assert page.locator("#base").is_hidden()  # there is nothing to compare
    steer(page, -1.5)
    assert page.locator("#helm-note").inner_text() == "0.750 in published units. Beyond what was calibrated: 0.3 to 1."
    steer(page, -1)
    assert page.locator("#helm-note").inner_text() == "0.500 in published units. Calibrated from 0.3 to 1."
    assert send(page) == "The green object is a diamond."
    assert page.locator("#base-text").text_content() == plain
    page.get_by_role("button", name="Set to 0").click()
    page.locator("#asked-sage-see").check()
    page.locator("#asked-sage-generate").check()
    page.locator("#asked-contrast").select_option("pai")
    assert not page.locator("#asked-sage-generate").is_checked()  # both contrast the answer with another
    assert send(page) == plain
    shown = page.locator("#card-applied").inner_text()
    assert "See" in shown
    assert "PAI" in shown
    assert "amplify 0.2" in shown


def test_the_way_is_found_where_auto_says_so(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, DIAMOND)
    plain = send(page)
    page.locator("#auto").check()
    assert page.locator("#helm-value").inner_text() == "1.0, auto"
    assert send(page) == plain
    answer = asked(demo, page)
    (applied,) = answer["applied"]["steering"]
    shown = page.locator("#card-applied").inner_text()
    assert f"toward {applied['toward']}" in shown
    assert "without images" in shown


def test_auto_that_abstains_says_that_nothing_was_steered_and_why(
    playground: Callable[..., Visit], demo: Flask
) -> None:
    page = playground().page
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200, content_type="text/event-stream", body=abstaining(route.fetch().text())
        ),
    )
    pick(page, DIAMOND)
    page.locator("#auto").check()
    send(page)
    chip = page.locator("#answer-chips .chip").first
    assert (chip.inner_text(), chip.get_attribute("title")) == ("auto: not steered", "It stands without either.")
    shown = page.locator("#card-applied").inner_text()
    assert "auto: not steered. It stands without either." in shown
    assert "without images" in shown
    assert "scale 0" not in shown


def abstaining(stream: str) -> str:
    """The stream of an answer whose way was found, as if none had been."""

    def changed(line: str) -> str:
        if not line.startswith("data: {"):
            return line
        event = json.loads(line.removeprefix("data: "))
        for choice in event["choices"]:
            for item in (choice.get("applied") or {}).get("steering", []):
                item |= {"toward": None, "strength": 0.0, "scale": 0.0, "published": 0.0, "dose": 0.0}
                item["auto"]["abstained"] = "It stands without either."
        return f"data: {json.dumps(event)}"

    return "\n".join(map(changed, stream.splitlines())) + "\n"


def test_auto_moves_a_helm_at_0_to_where_it_steers_from(playground: Callable[..., Visit]) -> None:
    page = playground().page
    helm, label, code = (page.locator(f"#{name}") for name in ("helm", "helm-value", "code-text"))
    page.locator("#auto").check()
    assert (helm.input_value(), label.inner_text()) == ("1", "1.0, auto")
    assert '"toward": "auto", "strength": 1' in " ".join(code.text_content().split())
    page.locator("#auto").uncheck()
    assert (helm.input_value(), label.inner_text()) == ("0", "off")
    page.locator("#auto").check()
    steer(page, 0)
    assert label.inner_text() == "off"
    assert '"steering"' not in code.text_content()
    steer(page, -0.5)
    assert label.inner_text() == "0.5, auto"
    page.locator("#auto").uncheck()
    assert label.inner_text() == "0.5 toward text"


def test_the_helm_goes_as_far_as_the_server(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    client = demo.test_client()
    published = client.get("/v1/steering/vectors/modality-preference").json["published"]  # type: ignore[index]
    most = client.get("/v1/models").json["data"][0]["limits"]["strength"] / published  # type: ignore[index]
    helm = page.locator("#helm")
    assert (float(helm.get_attribute("min")), float(helm.get_attribute("max"))) == (-most, most) == (-8.0, 8.0)
    band = [helm.evaluate(f"helm => helm.style.getPropertyValue('--calibrated-{end}')") for end in ("from", "to")]
    assert band == [f"{100 * (most + end) / (2 * most):g}%" for end in (-1, 1)]  # calibrated up to strength 1


def test_the_helm_begins_with_the_vector_that_the_server_begins_with(
    engine: steering.Engine, tmp_path: Path, live: Callable[[Flask], str], visit: Callable[..., Visit]
) -> None:
    vector = steering.VectorStore(checkpoint() / "vectors").get("modality-preference")
    (-0.5 * vector).named("half").save(tmp_path / "half.safetensors")
    app = create_app(Settings(vectors=(str(tmp_path),), slots=4, journal="off"), engine=engine)  # type: ignore[arg-type]
    page = visit().page
    page.goto(live(app))
    page.wait_for_selector("#vector option", state="attached")
    assert page.locator("#vector option").all_text_contents() == ["half", "modality-preference"]
    assert page.locator("#vector").input_value() == "modality-preference"
    page.wait_for_selector(".sample")
    steer(page, 1)
    assert '"vector"' not in page.locator("#code-text").text_content()
    page.locator("#vector").select_option("half")
    # Its strength 1 is a quarter of a published unit, of which the server takes 4; nothing was calibrated.
    assert page.locator("#helm").get_attribute("max") == "16"
    assert page.locator("#helm-note").inner_text() == "0.250 in published units."


def test_the_copied_code_gives_the_same_answer(playground: Callable[..., Visit], tmp_path: Path) -> None:
    visit = playground(permissions=["clipboard-read", "clipboard-write"])
    page = visit.page
    pick(page, DIAMOND)
    steer(page, -1)
    page.locator("#question").fill("What is the green object?\\")
    page.locator("#question").fill("What is the green object?")
    answer = send(page)
    (tmp_path / "image1.png").write_bytes((SAMPLES / "pink.png").read_bytes())
    copied = {}
    for language in ("curl", "Python"):
        page.get_by_text(language, exact=True).click()
        page.locator("#copy-code button").click()
        page.get_by_text("Copied").wait_for()
        copied[language] = page.evaluate("navigator.clipboard.readText()")
    assert "base64," not in copied["Python"].replace("base64,{data}", "")
    script = [sys.executable, "-c", copied["Python"]]
    said = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[0] == answer == "The green object is a diamond."
    if shutil.which("curl") and shutil.which("bash"):
        command = ["bash", "-c", copied["curl"]]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        assert json.loads(said)["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize("text", ['"quoted" $HOME `id` \\ \\n', "zwei\nZeilen, Ωμέγα 🧭", "EOF\nEOF", "'''\"\"\""])
def test_any_text_survives_in_the_code(playground: Callable[..., Visit], text: str, tmp_path: Path) -> None:
    page = playground().page
    page.locator("#question").fill(text)
    shown = {}
    for language in ("curl", "Python"):
        page.get_by_text(language, exact=True).click()
        shown[language] = page.locator("#code-text").text_content()
    heredoc = shown["curl"].replace(shown["curl"].partition("<<EOF")[0], "cat ", 1)
    sent = json.loads(subprocess.run(["bash", "-c", heredoc], capture_output=True, text=True, check=True).stdout)
    assert sent["messages"][0]["content"][-1]["text"] == text
    call = shown["Python"].partition("client.chat.completions.create(")[2].rpartition("\n)\n")[0]
    assert eval(f"dict({call})")["messages"][0]["content"][-1]["text"] == text


def test_errors_are_shown_as_the_server_says_them(playground: Callable[..., Visit]) -> None:
    visit = playground()
    visit.expected = ("400",)
    page = visit.page
    page.get_by_role("button", name="Send").click()
    assert page.locator("#error").inner_text().startswith("Write a question first.")
    page.locator("#question").fill("What color is the star?")
    page.get_by_text("Sampling and readouts").click()
    page.locator("#temperature").fill("-1")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("'temperature'").wait_for()
    assert page.locator("#error code").text_content() == "temperature"
    assert page.evaluate(  # not only there, but in sight
        """() => {
            const box = document.getElementById("error").getBoundingClientRect();
            return document.elementFromPoint(box.left + 20, box.top + 8).closest("#error") !== null;
        }"""
    )
    assert page.locator("#temperature").get_attribute("aria-invalid") == "true"
    assert page.locator("#answers").is_hidden()
    page.locator("#temperature").fill("0")
    assert send(page)
    assert page.locator("#error").is_hidden()


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
    page.get_by_role("button", name="Move picture 3 forward").click()
    page.get_by_role("button", name="Remove picture 1").click()
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
    page.get_by_text("no.png is not a picture").wait_for()
    with page.expect_request("**/v1/chat/completions") as caught:
        assert send(page) == "The letter is K."
    sent = [part["image_url"]["url"] for part in caught.value.post_data_json["messages"][0]["content"][:-1]]
    expected = [encoded(SAMPLES / name) for name in ("letter.png", "gray.png", "cyan.png")]
    assert [url.partition(",")[2] for url in sent] == expected
    assert page.locator("#views figure").count() == 3


def middle(page: Any, selector: str) -> tuple[float, float]:
    """The point in the middle of an element."""
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
    assert page.url == address
    assert page.locator("#context").input_value() == "half a sentence"
    assert page.locator("#tray img").get_attribute("alt") == "Picture 1: letter.png"
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
    page.get_by_text("notes.txt is not a picture").wait_for()
    assert page.url == address
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
    assert page.url == address
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
    page.wait_for_timeout(300)
    assert page.locator("#tray li").count() == pictures


MEANT = {
    "perceptual_blindness": ("neither map is concentrated", "at least one of the maps is concentrated"),
    "dissociation": ("rests on other patches than those looked at", "rests on patches that are looked at"),
}


@pytest.mark.parametrize("value", [True, False, None])
def test_a_flag_says_what_its_own_state_means(playground: Callable[..., Visit], value: bool | None) -> None:
    page = playground().page

    def told(route: Any) -> None:
        body = route.fetch().text()
        for name in MEANT:
            for known in ("true", "false", "null"):
                body = body.replace(f'"{name}":{known}', f'"{name}":{json.dumps(value)}')
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", told)
    pick(page, GREEN)
    send(page)
    chip = {True: "raised", False: "clear", None: "not known"}[value]
    for shown, (raised, clear) in zip(page.locator("#card-flags li").all_inner_texts(), MEANT.values(), strict=True):
        assert chip in shown
        assert (raised in shown) is (value is True)
        assert (clear in shown) is (value is False)
        assert ("too few patches" in shown) is (value is None)


def test_everything_is_done_by_keyboard(playground: Callable[..., Visit]) -> None:
    page = playground().page

    def tab_to(selector: str) -> None:
        for _ in range(80):
            page.keyboard.press("Tab")
            if page.evaluate("(s) => document.activeElement.matches(s)", selector):
                return
        raise AssertionError(f"Tab never reaches {selector}")

    tab_to(".sample")
    page.keyboard.press("Enter")
    page.wait_for_selector("#tray li")
    tab_to("#helm")
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    assert page.locator("#helm-value").text_content() == "1.0 toward vision"
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#answer-words:not([hidden])")
    tab_to("#answer-words .word")
    attention = heat(page, 1)
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.textContent") == "yellow."
    assert "“yellow.”" in page.locator("#look-note").inner_text()
    assert heat(page, 1) != attention
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.getAttribute('aria-pressed')") == "true"
    page.keyboard.press("Escape")
    tab_to("#layer")
    page.keyboard.press("ArrowRight")
    assert page.locator("#layer-value").text_content() == "0"
    tab_to("#card-focus svg")
    page.keyboard.press("ArrowRight")
    assert page.locator("#card-focus .place").text_content() == "layer 1"


@pytest.mark.parametrize("width", [360, 390])
def test_a_phone_needs_no_sideways_scrolling(playground: Callable[..., Visit], width: int) -> None:
    opened = playground(viewport={"width": width, "height": 780}, color_scheme="dark")
    assert opened.fits()
    pick(opened.page, "Which of three")
    opened.page.get_by_text("Sampling and readouts").click()
    opened.page.locator("#asked-contrast").select_option("icd")
    send(opened.page)
    assert opened.fits()
    opened.page.get_by_text("Raw JSON").click()
    assert opened.fits()


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a, [role=toolbar], svg[role=img]")]
    .filter((e) => e.offsetParent !== null)
    .filter((e) => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute("aria-labelledby")))
    .map((e) => e.outerHTML)"""


def test_everything_has_a_name(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    page.locator("#asked-contrast").select_option("vcd")
    send(page)
    assert page.evaluate(NAMELESS) == []


def test_motion_is_left_out_where_the_person_says_so(playground: Callable[..., Visit]) -> None:
    page = playground().page
    duration = "getComputedStyle(document.getElementById('asked-sage-see')).transitionDuration"
    assert page.evaluate(duration) == "0.15s"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(duration) == "0s"


def test_light_and_dark(playground: Callable[..., Visit]) -> None:
    page = playground(color_scheme="dark").page
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Dark theme").click()
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert dark != light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == light


# ------------------------------------------------------------------------------- in a browser, with a fake engine


def test_stop_ends_the_answer(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("Hel", threading.Event())
    opened = visit()
    page = opened.page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.get_by_text("No steering vector of this server matches the model.").wait_for()
    assert page.locator("#helm").is_disabled()
    assert page.locator("#samples-section").is_hidden()
    page.locator("#question").fill("hi")
    page.get_by_role("button", name="Send").click()
    until(page, "document.getElementById('answer-live').textContent === 'Hel'")
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").wait_for()
    assert fake.completions[0].cancelled.wait(5)
    assert page.get_by_role("button", name="Send").is_enabled()


def test_it_waits_for_the_model(
    visit: Callable[..., Visit], live: Callable[[Flask], str], engine: steering.Engine
) -> None:
    settings = Settings(vectors=(), journal="off")  # type: ignore[arg-type]
    loaded = threading.Event()

    def load(settings: Settings) -> Serving:
        loaded.wait(30)
        return Serving.of(adapted(engine), settings)

    runtime = Runtime(settings, loader=load)
    runtime.start()
    opened = visit()
    opened.expected = ("503",)
    opened.page.goto(live(create_app(settings, runtime=runtime)))
    opened.page.get_by_text("The model is still loading.").wait_for()
    assert opened.page.locator("#send").is_disabled()
    loaded.set()
    pick(opened.page, GREEN)
    assert opened.page.locator("#send").is_enabled()


def test_a_stream_that_breaks_is_told(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("Hel", ValueError("boom"))
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    page.get_by_text("The server had an unexpected error").wait_for()
    assert page.locator("#answer-live").text_content() == "Hel"


def test_the_key_is_asked_for_and_kept_in_the_tab(
    visit: Callable[..., Visit], live: Callable[[Flask], str], engine: steering.Engine
) -> None:
    settings = Settings(vectors=(), api_keys=("sk-0123456789",), journal="off")  # type: ignore[arg-type]
    opened = visit()
    opened.expected = ("401",)
    page = opened.page
    page.goto(live(create_app(settings, engine=engine)))
    page.get_by_label("This server asks for an API key.").fill("sk-wrong-key")
    page.get_by_role("button", name="Use key").click()
    page.get_by_text("Incorrect API key provided.").wait_for()
    page.get_by_label("This server asks for an API key.").fill("sk-0123456789")
    page.get_by_role("button", name="Use key").click()
    pick(page, GREEN)
    assert page.locator("#key-form").is_hidden()
    assert send(page) == "The star is green."
    assert "$HELMSIGHT_API_KEY" in page.locator("#code-text").text_content()
    assert page.evaluate("JSON.stringify({...localStorage}) + document.cookie + location.href").count("0123") == 0
    assert page.evaluate("JSON.stringify({...sessionStorage})").count("sk-0123456789") == 1


def test_what_a_model_says_is_text(visit: Callable[..., Visit], live: Callable[[Flask], str]) -> None:
    fake = FakeEngine("<img src=x onerror=alert(1)>", "<b>bold</b>")
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=fake)))  # type: ignore[arg-type]
    page.locator("#question").fill("hi")
    page.locator("#send:enabled").click()
    page.wait_for_selector("#answers:not([aria-busy])")
    assert page.locator("#answer-live").text_content() == "<img src=x onerror=alert(1)><b>bold</b>"
    assert page.locator("#answer-live").evaluate("element => element.children.length") == 0
