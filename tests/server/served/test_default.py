"""The default server, as `make serve` starts it, answers as the plain path does.

Every kind of request is sent before its steps are compiled, while they come into use and afterwards, mixed and then alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.served.asking import Clients
from tests.server.served.kinds import Kind
from tests.server.served.serving import Inside, Plain, Withheld, compiled_steps, serving

pytestmark = pytest.mark.slow

IMAGES, PREFIXES = 5_000, 250_000
"""Bytes of caches in which there is room for one picture, and for the beginning of one prompt."""


@pytest.fixture(scope="module")
def steps(folder: Path) -> list[str]:
    return compiled_steps(folder)


def test_every_answer_is_that_of_the_plain_path(
    folder: Path, plain: Plain, every: list[Kind], steps: list[str], tmp_path: Path
) -> None:
    with (
        Withheld(tmp_path / "compiled", steps) as withheld,
        serving(folder, tmp_path, withheld.folder) as server,
    ):
        clients = Clients(server, plain, every)
        clients.across_the_switch(withheld)
        clients.check()
        server.check_used()


def test_what_is_kept_may_go_at_any_time(folder: Path, plain: Plain, every: list[Kind], steps: list[str]) -> None:
    """Caches in which there is hardly room: what one request has left there is gone before another one wants it."""
    with Inside(folder, image_cache_bytes=IMAGES, prefix_cache_bytes=PREFIXES) as inside:
        clients = Clients(inside, plain, every)
        clients.mixed(1)
        clients.check()
        stats = inside.engine.stats()
        assert stats["compiled_steps"] > 0
        assert 0 < stats["image_cache_bytes"] <= IMAGES
        assert 0 < stats["prefix_cache_bytes"] <= PREFIXES
        assert stats["image_cache_misses"] > 40  # of four pictures, in few sizes
        assert stats["prefix_cache_hits"] > 0
        assert stats["faults"] == 0
