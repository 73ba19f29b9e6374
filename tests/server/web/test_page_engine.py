"""The playground greys out what the server's engine does not support."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flask import Flask

from server.app import create_app
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web.browser import Visit


def test_what_the_engine_lacks_is_shown_and_cannot_be_chosen(
    visit: Callable[..., Visit], live: Callable[[Flask], str]
) -> None:
    opened = visit()
    page = opened.page

    def models(route: Any) -> None:
        found = route.fetch().json()
        lacking = ["sage.see", "contrast.pai", "dola", "diagnostics.tam"]
        found["data"][0] |= {"engine": "vLLM 0.32.0", "unsupported": lacking, "readouts": ["focus"]}
        route.fulfill(json=found)

    page.route("**/v1/models", models)
    url = live(create_app(Settings(journal="off"), engine=FakeEngine()))  # type: ignore[arg-type]
    page.goto(url)
    lacking = page.locator("#interventions .lacking")
    lacking.wait_for()
    assert lacking.locator("h2").inner_text() == "Not supported by vLLM 0.32.0"
    assert lacking.locator("label").all_text_contents() == ["SAGE: See", "CONTRAST: PAI", "DoLa"]
    assert lacking.locator("input:enabled").count() == 0
    readouts = page.locator("#include label")
    assert readouts.all_text_contents() == ["focus", "tam"]
    assert readouts.nth(1).locator("input").is_disabled()
    page.goto(f"{url}/model")
    page.get_by_text("sage.see, contrast.pai, dola").wait_for()
