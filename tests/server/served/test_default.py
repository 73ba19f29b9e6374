"""The default server, as `make serve` starts it: every kind of request before its steps are compiled, while they come into
use and afterwards, alone and mixed, is answered as by the plain path alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.served.asking import Clients
from tests.server.served.kinds import Kind
from tests.server.served.serving import KEPT, Plain, Withheld, compiled_steps, serving

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


def test_what_is_kept_may_go_at_any_time(
    folder: Path, plain: Plain, every: list[Kind], steps: list[str], tmp_path: Path
) -> None:
    """Caches in which there is hardly room: what one request has left there is gone before another one wants it."""
    bounds = ["--image-cache", str(IMAGES), "--prefix-cache", str(PREFIXES)]
    with serving(folder, tmp_path, KEPT, *bounds) as server:
        server.wait_until_compiled(len(steps))
        clients = Clients(server, plain, every)
        for phase in (2, 1):
            clients.mixed(phase)
        clients.check()
        server.check_used()
        assert server.metric("image_cache_bytes") <= IMAGES
        assert server.metric("prefix_cache_bytes") <= PREFIXES
        assert server.metric("image_cache_misses_total") > len(every)
