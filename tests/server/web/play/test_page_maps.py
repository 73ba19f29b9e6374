"""Maps over the pictures: token by token, over gray pictures, and as files."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flask import Flask
from PIL import Image

from tests.server.web.browser import Visit
from tests.server.web.playing import GREEN, TWO, asked, heat, highest, pick, send, steer


def test_the_slider_goes_through_the_tokens(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    send(page)
    page.locator("#smooth").uncheck()
    said = asked(demo, page)["diagnostics"]["tam"]
    shown = [entry for entry in said if entry["token"].strip() not in ("", "<|im_end|>")]
    slider, value = page.locator("#token"), page.locator("#token-value")
    assert (slider.get_attribute("max"), value.inner_text()) == (str(len(shown)), "all")
    attention = heat(page, 1)
    for i, entry in enumerate(shown, 1):
        slider.fill(str(i))
        assert value.inner_text() == f"{i} of {len(shown)}: “{entry['token'].strip()}”"
        if any(entry["map"]):
            assert highest(heat(page, 1)) == highest(entry["map"])
        word = page.locator("#answer-words .now").inner_text()
        assert entry["token"].strip() in word
        assert page.locator("#scale-name").inner_text() == "activation"
    slider.fill("0")
    assert heat(page, 1) == attention
    assert page.locator("#answer-words .now").count() == 0
    assert page.locator("#scale-name").inner_text() == "attention"


def test_pictures_under_maps_are_gray_until_wanted_otherwise(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, TWO)
    send(page)
    filters = "[...document.querySelectorAll('.stack img')].map((image) => getComputedStyle(image).filter)"
    assert page.evaluate(filters) == ["grayscale(1)"] * 2
    page.locator("#gray").uncheck()
    assert page.evaluate(filters) == ["none"] * 2
    assert page.locator("#scale-top").inner_text() != ""


def test_the_two_shares_of_a_picture_say_of_what_they_are(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, TWO)
    send(page)
    said = asked(demo, page)["diagnostics"]
    focus = said["focus"]
    part = f"{100 * focus['share']:.0f} % of the attention on images (sigma)"
    note = f"image 2: {part} in the last {focus['m_lnd']['n']} layers"
    assert note in page.locator("#card-focus").inner_text()
    maps = [[sum(column) for column in zip(*image["rho"], strict=True)] for image in said["patches"]]
    part = 100 * sum(maps[1]) / (sum(maps[0]) + sum(maps[1]))
    assert f"{part:.0f} % of this map" in page.locator("#views figure").nth(1).inner_text()


def test_a_map_is_saved_with_its_legend(playground: Callable[..., Visit]) -> None:
    page = playground().page
    pick(page, GREEN)
    send(page)
    with page.expect_download() as caught:
        page.get_by_role("button", name="Save PNG of the map of image 1").click()
    assert caught.value.suggested_filename == "cyan-map.png"
    image = Image.open(io.BytesIO(Path(caught.value.path()).read_bytes())).convert("RGB")
    width, height = image.size
    assert width >= 500
    assert height == width + 56
    legend = [image.getpixel((x, width + 16)) for x in (30, 180)]
    brightness = [sum(pixel) for pixel in legend if isinstance(pixel, tuple)]
    assert brightness[0] < 150  # from dark, for nothing,
    assert brightness[1] > 500  # to bright, for the most
    # Of the picture only gray is left: where the map is cold, colours are those of its dark end.
    pixel: Any = image.getpixel((width - 5, width - 5))
    assert max(pixel) - min(pixel) < 60


def test_all_readouts_are_saved_as_json(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, 1)
    send(page)
    with page.expect_download() as caught:
        page.get_by_role("button", name="Save readouts (JSON)").click()
    saved = json.loads(Path(caught.value.path()).read_text())
    choice = asked(demo, page)
    first, base = saved["answers"]
    assert first["diagnostics"] == choice["diagnostics"]
    assert first["applied"] == choice["applied"]
    assert (base["text"], base["diagnostics"]) == ("The star is green.", choice["baseline"]["diagnostics"])
    assert saved["model"] == "helmsight-demo"
    assert saved["request"]["messages"][0]["content"][0]["image_url"]["url"] == "image1.png"


def test_where_nothing_is_nothing_is_laid_over_the_picture(playground: Callable[..., Visit], demo: Flask) -> None:
    page = playground().page
    pick(page, GREEN)
    steer(page, -1)
    send(page)
    tokens = [entry for entry in asked(demo, page)["diagnostics"]["tam"] if entry["token"].strip()]
    empty = next(i for i, entry in enumerate(tokens, 1) if not any(entry["map"]))
    page.locator("#token").fill(str(empty))
    assert heat(page, 1) == [0.0] * 9
    assert page.locator(".stack.gray").count() == 0
    assert "rests on no patch" in page.locator("#look-note").inner_text()
    assert page.locator("#scale").is_hidden()
