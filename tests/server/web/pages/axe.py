"""axe-core, which finds what keeps people from using a page (https://github.com/dequelabs/axe-core, MPL-2.0)."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

WIDTHS = (360, 768, 1280)
"""The widths of a phone, a tablet and a desk."""
COLOURS = ("color-contrast", "link-in-text-block")
"""The rules that look at colours, which are all that differs in the dark."""
FOLDER = Path(__file__).parent / "axe"


@cache
def source() -> str:
    return (FOLDER / "axe.min.js").read_text()


def findings(page: Any, *rules: str) -> list[str]:
    """Return axe-core's findings in a page as it stands, by these of its rules, or by all of them.

    Contrast that it cannot judge is left out.
    """
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(source() + "; undefined")
    only = {"runOnly": {"type": "rule", "values": rules}} if rules else {}
    found = page.evaluate("only => axe.run(document, { resultTypes: ['violations'], preload: false, ...only })", only)
    return [
        f"{one['id']} ({one['impact']}): {node['target']}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]


def everywhere(page: Any, main: str = "h1") -> list[str]:
    """Return the faults of a page as it stands in every look.

    Faults are axe-core's findings, scrolling sideways, and a main element that is not visible.
    """
    found = []
    for width, (scheme, rules) in product(WIDTHS, (("light", ()), ("dark", COLOURS))):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        wrong = findings(page, *rules)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wrong.append("it scrolls sideways")
        if not page.locator(main).first.is_visible():
            wrong.append(f"{main} is not there")
        found += [f"{width} {scheme}: {one}" for one in wrong]
    return found
