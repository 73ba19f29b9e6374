"""axe-core, which finds what keeps people from using a page (https://github.com/dequelabs/axe-core, MPL-2.0)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

LOOKS = [(width, scheme) for width in (360, 768, 1280) for scheme in ("light", "dark")]
"""The widths of a phone, a tablet and a desk."""
FOLDER = Path(__file__).parent / "axe"


@cache
def source() -> str:
    return (FOLDER / "axe.min.js").read_text()


def findings(page: Any) -> list[str]:
    """Return axe-core's findings in a page as it stands, by all of its rules.

    Contrast that it cannot judge is left out.
    """
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(source() + "; undefined")
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'], preload: false })")
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
    for width, scheme in LOOKS:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        wrong = findings(page)
        if page.evaluate("document.documentElement.scrollWidth > window.innerWidth"):
            wrong.append("it scrolls sideways")
        if not page.locator(main).first.is_visible():
            wrong.append(f"{main} is not there")
        found += [f"{width} {scheme}: {one}" for one in wrong]
    return found
