"""The playground in a real browser against a real server: it shows what the server says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.fakes import checkpoint
from tests.server.web.browser import Visit
from tests.server.web.playing import DIAMOND, GREEN, SAMPLES, TWO, asked, heat, highest, pick, send, steer


def test_a_whole_round_shows_what_the_server_says(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    assert page.locator("#helm-value").text_content() == "1.0 toward the image"
    answer = send(page)
    choice = asked(demo, page)
    assert answer == choice["message"]["content"] == "The star is yellow."
    assert page.locator("#base-live").text_content() == choice["baseline"]["message"]["content"] == "The star is green."
    assert page.locator("#look").is_visible()
    said = choice["diagnostics"]

    # The line of sigma has the server's values: heights above the axis are in their proportion.
    drawn = page.locator('#card-focus .line[data-name="image 1"] circle').evaluate_all(
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
    assert page.locator("#card-residual .chart svg").count() == 10
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
    assert page.locator(".view.focused").inner_text().startswith("Image 2\nfocused")
    # Without a text context there is no ratio, but the images' share of all attention.
    modality = choice["diagnostics"]["modality"]
    assert (modality["attention_ratio"], modality["reason"]) == (None, "no_context")
    share = modality["image_share"]
    assert f"{100 * share:.{int(share < 0.1)}f} % of all" in page.locator("#card-modality").inner_text()

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
    page.locator("#whose").get_by_text("Baseline").click()
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
    assert page.locator("#base-live").text_content() == plain
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
    assert "text unchanged" in page.locator("#answer-meta").inner_text()
    answer = asked(demo, page)
    (applied,) = answer["applied"]["steering"]
    side = {"vision": "image", "text": "text"}[applied["toward"]]
    assert page.locator("#answer-chips .chip").first.inner_text() == f"auto: toward the {side}, 1"
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
    """Return the stream of an answer for which "auto" chose a way, changed as if it had chosen none."""

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
    assert label.inner_text() == "0.5 toward the text"


def test_the_helm_goes_twice_as_far_as_calibrated_and_further(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    client = demo.test_client()
    published = client.get("/v1/steering/vectors/modality-preference").json["published"]  # type: ignore[index]
    most = client.get("/v1/models").json["data"][0]["limits"]["strength"] / published  # type: ignore[index]
    helm = page.locator("#helm")

    def reaches(limit: float) -> None:
        assert (float(helm.get_attribute("min")), float(helm.get_attribute("max"))) == (-limit, limit)
        band = [helm.evaluate(f"helm => helm.style.getPropertyValue('--calibrated-{end}')") for end in ("from", "to")]
        assert band == [f"{100 * (limit + end) / (2 * limit):g}%" for end in (-1, 1)]  # calibrated up to strength 1

    reaches(2.0)
    page.get_by_role("button", name="Further").click()
    assert most == 8.0
    reaches(most)
    steer(page, 5)
    page.get_by_role("button", name="Nearer").click()
    reaches(2.0)
    assert helm.input_value() == "2"
    page.goto(page.url.partition("#")[0] + "#strength=5")
    page.reload()
    page.wait_for_selector(".sample")
    assert helm.input_value() == "5", "a link is not cut"


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
    assert answer == "The green object is a diamond."
    page.get_by_text("Python", exact=True).click()
    page.locator("#copy-code button").click()
    page.get_by_text("Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert "base64," not in copied.replace("base64,{data}", "")
    scripts = {"Chat": copied, **{name: code(page, name, "Python") for name in ("Responses", "Messages")}}
    for name, script in scripts.items():
        if find_spec("anthropic" if name == "Messages" else "openai") is not None:
            done = subprocess.run(
                [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
            )
            assert done.stdout.splitlines()[:1] == [answer], done.stderr
    if shutil.which("curl") and shutil.which("bash"):
        read = {
            "Chat": lambda said: said["choices"][0]["message"]["content"],
            "Responses": lambda said: said["output"][0]["content"][0]["text"],
            "Messages": lambda said: said["content"][0]["text"],
        }
        for name, text_of in read.items():
            command = ["bash", "-c", code(page, name, "curl")]
            said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
            assert text_of(json.loads(said)) == answer


def code(page: Any, protocol: str, language: str) -> str:
    """Return the code that the page shows in a protocol and a language."""
    for word in (protocol, language):
        page.locator("#code").get_by_text(word, exact=True).click()
    return str(page.locator("#code-text").text_content())


def test_any_text_survives_in_the_code(playground: Callable[..., Visit]) -> None:
    page = playground().page
    for text in ('"quoted" $HOME `id` \\ \\n', "zwei\nZeilen, Ωμέγα 🧭", "EOF\nEOF", "'''\"\"\""):
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


def test_the_code_for_messages_calls_the_package_with_what_it_takes(playground: Callable[..., Visit]) -> None:
    page = playground().page
    page.locator("#question").fill("hi")
    page.get_by_text("Sampling and readouts").click()
    page.locator("#seed").fill("7")
    page.locator("#temperature").fill("0.5")
    called = {}
    for name in ("Chat", "Responses", "Messages"):
        call = code(page, name, "Python").partition(".create(")[2].rpartition("\n)\n")[0]
        called[name] = eval(f"dict({call})")
    own = {name: sorted({"seed", "temperature"} & set(call.pop("extra_body"))) for name, call in called.items()}
    assert own == {"Chat": [], "Responses": ["seed"], "Messages": ["seed", "temperature"]}
    assert set(called["Messages"]) == {"model", "messages", "max_tokens"}  # as of anthropic 2.14


def test_errors_are_shown_as_the_server_says_them(playground: Callable[..., Visit]) -> None:
    visit = playground()
    visit.expected = ("400",)
    page = visit.page
    page.get_by_role("button", name="Send").click()
    assert page.locator("#error").inner_text() == "Write a question first."
    assert page.evaluate("document.activeElement.id") == "question"
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


MEANT = {
    "perceptual_blindness": (
        "Neither the attention nor the activation map",
        "or both are concentrated somewhere",
    ),
    "dissociation": ("on other patches than the activation map", "The activation map and the attention agree, or"),
}


def test_a_flag_says_what_its_own_state_means(playground: Callable[..., Visit]) -> None:
    page = playground().page

    def told(route: Any) -> None:
        body = route.fetch().text()
        for name in MEANT:
            for known in ("true", "false", "null"):
                body = body.replace(f'"{name}":{known}', f'"{name}":{json.dumps(value)}')
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route("**/v1/chat/completions", told)
    pick(page, GREEN)
    for value, chip in ((True, "raised"), (False, "clear"), (None, "not known")):
        send(page)
        lines = page.locator("#card-flags li").all_inner_texts()
        for shown, (raised, clear) in zip(lines, MEANT.values(), strict=True):
            assert chip in shown
            assert (raised in shown) is (value is True)
            assert (clear in shown) is (value is False)
            assert ("too few patches" in shown) is (value is None)
