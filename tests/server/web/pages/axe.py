"""axe-core, which finds what keeps people from using a page (https://github.com/dequelabs/axe-core, MPL-2.0)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "axe"


@cache
def source() -> str:
    return (FOLDER / "axe.min.js").read_text()


def findings(page: Any) -> list[str]:
    """What axe-core finds in a page as it stands, all of its rules applied, and what it cannot tell of contrast left out."""
    if not page.evaluate("typeof window.axe === 'object'"):
        page.evaluate(source() + "; undefined")
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'], preload: false })")
    return [
        f"{one['id']} ({one['impact']}): {node['target']}: {node['failureSummary']}"
        for one in found["violations"]
        for node in one["nodes"]
    ]
