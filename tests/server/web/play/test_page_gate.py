"""A condition of steering on the playground, and on the page of vectors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import steering
from server.app import create_app
from server.settings import Settings
from tests.server.web.browser import Visit
from tests.server.web.playing import DIAMOND, pick, send, steer
from tests.steering.interventions.pushes import unit_vector

WORTH = {"auroc": [0.94, 0.88, 0.98], "open_when": [0.9, 0.8, 0.95], "open_not": [0.1, 0.05, 0.2], "examples": [30, 30]}


def test_a_condition_is_chosen_and_described(
    engine: steering.Engine, live: Callable[..., str], visit: Callable[..., Visit], tmp_path: Path
) -> None:
    drawn = unit_vector(engine.mllm, 5, (1,), "never")
    gate: dict[str, Any] = {"layer": 1, "threshold": 1.0, "measure": "cosine", **WORTH}  # no cosine is above 1
    steering.SteeringVector(
        "never", drawn.direction, drawn.weight, drawn.mean_abs, drawn.std, (1,), engine.mllm.fingerprint,
        kind="condition", info={"gate": gate},
    ).save(tmp_path / "never.safetensors")  # fmt: skip
    app = create_app(Settings(vectors=(str(tmp_path),), slots=4, max_waiting=8, journal="off"), engine=engine)
    opened = visit()
    page, url = opened.page, live(app)
    page.goto(url)
    page.wait_for_selector(".sample")
    pick(page, DIAMOND)
    plain = send(page)
    steer(page, -2)
    assert send(page) != plain
    page.locator("#when").select_option("never")
    bodies: list[Any] = []
    page.on("request", lambda request: request.url.endswith("/completions") and bodies.append(request.post_data_json))
    assert send(page) == plain
    assert bodies[-1]["steering"]["when"] == {"vector": "never"}
    assert "condition not met" in page.locator("#answer-chips").inner_text()
    page.locator("#asked-sage-see").check()
    page.locator("#strengths").evaluate("input => { input.value = '-2, 0'; }")
    page.locator("#compare").click()
    page.locator("#answer2-chips", has_text="See").wait_for()
    page.wait_for_selector("#answers:not([aria-busy])")
    assert page.locator("#answer1-chips .chip").all_inner_texts() == ["condition not met: not steered", "See"]
    page.goto(f"{url}/vectors")
    text = page.get_by_text("as a condition").locator("xpath=ancestor::section").inner_text()
    assert "cosine above 1 at layer 1" in text
    assert "0.940 (0.880 to 0.980)" in text
    assert "90 % (80 % to 95 %)" in text
    opened.check()
