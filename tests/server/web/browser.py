"""A headless Chromium for the tests of the pages; tests that ask for it are skipped where there is none."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.waiting import PATIENCE

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
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--process-per-site"])
        yield browser
        browser.close()


class Visit:
    """A page; keeps what it complains of and where it sends requests.

    `key` and `idle` are for `Contexts`.
    """

    def __init__(self, context: Any, key: str = "", idle: Any = None):
        self.context, self.key, self.idle = context, key, idle
        self.page = context.new_page()
        self.page.add_init_script(WATCH)
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
    eventually(page, lambda: page.evaluate(condition))


def eventually(page: Any, happened: Callable[[], bool]) -> None:
    """Wait for what a page does, while it goes on."""
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        page.wait_for_timeout(50)


def drop(page: Any, files: Sequence[Path], x: float, y: float) -> None:
    """Drop files from outside the browser at a point of the page, as a person does; then let the page come to rest."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, "x": x, "y": y, "data": data})
    session.detach()
    page.wait_for_timeout(300)


class Contexts:
    """Browsers without a past, for visits one after another.

    Playwright's contexts are kept and emptied between visits, each with a page that does nothing: it keeps the process alive
    that draws the pages of 127.0.0.1. Another process for each visit takes a second of processor time.
    """

    def __init__(self, chromium: Any):
        self._chromium = chromium
        self._kept: dict[str, tuple[Any, Any, set[str]]] = {}
        """Contexts by their options, each with the page that stays and the hosts whose storage is to be emptied."""

    def open(
        self,
        viewport: dict[str, int],
        *,
        color_scheme: Any = None,
        reduced_motion: Any = None,
        now: int | None = None,
        **options: Any,
    ) -> Visit:
        """Open a page in a context with these options, which no other open visit has.

        Viewport, colours and motion are the page's own. `now` is the time at which the context's clock stands still.
        """
        key = repr((now, sorted(options.items())))
        if key in self._kept:
            context, idle, hosts = self._kept.pop(key)
            session = context.new_cdp_session(idle)
            for host in hosts:  # now, as the pages that were there wrote when they ended
                session.send("Storage.clearDataForOrigin", {"origin": f"http://{host}", "storageTypes": "all"})
            session.detach()
        else:
            context, idle = self._chromium.new_context(**options), None
            context.set_default_timeout(1000 * PATIENCE)
            if now is not None:
                context.clock.set_fixed_time(now)
        visit = Visit(context, key, idle)
        visit.page.set_viewport_size(viewport)
        visit.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        return visit

    def close(self, visit: Visit) -> None:
        """Close a visit's pages; its context waits for the next visit, unless another one with the same options does."""
        context, idle = visit.context, visit.idle
        if visit.key in self._kept:
            context.close()
            return
        if idle is None:
            idle = context.new_page()
            idle.route("**", lambda route: route.fulfill(body=""))
            idle.goto("http://127.0.0.1")
        for page in context.pages:
            if page != idle:
                page.close()
        context.clear_cookies()
        context.set_offline(False)
        self._kept[visit.key] = context, idle, visit.hosts - {""}


@pytest.fixture(scope="session")
def contexts(chromium: Any) -> Contexts:
    """Return the contexts that visits share, one after another."""
    return Contexts(chromium)


@pytest.fixture
def visit(contexts: Contexts, live: Any) -> Iterator[Callable[..., Visit]]:
    """Open a fresh visit; options are those of Playwright's new_context, and `now`. Each is checked at the end.

    It asks for `live` only to end before it: a page whose server is gone complains.
    """
    visits: list[Visit] = []

    def begin(**options: Any) -> Visit:
        visits.append(contexts.open(**{"viewport": {"width": 1280, "height": 900}, **options}))
        return visits[-1]

    yield begin
    with ExitStack() as stack:
        for each in visits:
            stack.callback(contexts.close, each)
        for each in visits:
            each.check()
