"""A headless Chromium for the tests of the pages; tests that ask for it are skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
    window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""
UNCOVERED = """(selector) => {
    const box = document.querySelector(selector).getBoundingClientRect();
    return [box.top + 1, box.bottom - 1].every((y) =>
        document.elementFromPoint(box.left + box.width / 2, y)?.closest(selector) !== null);
}"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Yield the browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no browser found; looked for {', '.join(NAMES)}")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page in a browser of its own; keeps what it complains of and where it sends requests."""

    def __init__(self, context: Any):
        context.add_init_script(WATCH)
        self.context = context
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.expected: tuple[str, ...] = ()
        """Parts of complaints that a test provokes."""
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))

    def _console(self, message: Any) -> None:
        expected = ("willReadFrequently", *self.expected)  # the tests read pixels, the pages do not
        if message.type in ("error", "warning") and not any(text in message.text for text in expected):
            self.complaints.append(message.text)

    def check(self) -> None:
        """Nothing was complained of, nothing violated the policy, and only the server was asked."""
        violations = self.page.evaluate("window.violations")
        assert (self.complaints, violations) == ([], []), f"{self.complaints} {violations}"
        assert self.hosts - {""} == {urlsplit(self.page.url).netloc}, self.hosts

    def fits(self) -> bool:
        """Return whether nothing makes the page scroll sideways."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    def uncovered(self, selector: str) -> bool:
        """Return whether nothing of an element is scrolled away or under another one."""
        return bool(self.page.evaluate(UNCOVERED, selector))


def until(page: Any, condition: str) -> None:
    """Wait for a condition in JavaScript; the page's policy forbids Playwright's own way to do so."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never came true: {condition}")


def drop(page: Any, files: Sequence[Path], x: float, y: float) -> None:
    """Drop files from outside the browser at a point of the page, as a person does; then let the page come to rest."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
    session.detach()
    page.wait_for_timeout(300)


@pytest.fixture
def visit(chromium: Any, live: Any) -> Iterator[Callable[..., Visit]]:
    """Open a fresh visit; options are those of Playwright's new_context. Each is checked at the end.

    It asks for `live` only to end before it: a page whose server is gone complains.
    """
    visits = []

    def begin(**options: Any) -> Visit:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        context.set_default_timeout(60_000)
        visits.append(Visit(context))
        return visits[-1]

    yield begin
    for each in visits:
        each.check()
        each.context.close()
