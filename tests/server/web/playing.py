"""A person's actions on the playground, and what the page then shows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from flask import Flask

from tests.server.fakes import checkpoint

GREEN, DIAMOND, TWO = "The text says green", "The text says diamond", "One of two pictures"
SAMPLES = checkpoint() / "samples"


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


def bodies_of(page: Any) -> list[Any]:
    """Return the bodies of the chats that the page asks for from now on, as they come."""
    bodies: list[Any] = []
    page.on("request", lambda request: request.url.endswith("/completions") and bodies.append(request.post_data_json))
    return bodies


def asked(demo: Flask, page: Any) -> Any:
    """Return the first choice of the answer to the request that the page shows as curl, with the samples' pictures."""
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
    """Return a picture's overlay on a 3 x 3 grid: the mean brightness at each cell's centre."""
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
