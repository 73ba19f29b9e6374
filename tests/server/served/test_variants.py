"""The same of servers that are not quite the default one: in half precision, with small caches, and with two replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.served.asking import Clients
from tests.server.served.kinds import Kind
from tests.server.served.model import served_model
from tests.server.served.serving import Plain, Withheld, compiled_steps, serving

pytestmark = pytest.mark.long


TAME = 8.0
"""Logits of the model in half precision are divided by this: roundings of a contrast, too, are then less than a tie."""
IMAGES, PREFIXES = 5_000, 250_000
"""Bytes of caches in which there is room for one picture, and for the beginning of one prompt."""


def test_in_half_precision(every: list[Kind], tmp_path: Path) -> None:
    folder = served_model(tmp_path / "model", TAME)
    half = Plain(folder, dtype="bfloat16")
    with (
        Withheld(tmp_path / "compiled", compiled_steps(folder, "bfloat16")) as withheld,
        serving(folder, tmp_path, withheld.folder, "--dtype", "bfloat16") as server,
    ):
        clients = Clients(server, half, every, half=True)
        clients.across_the_switch(withheld)
        print(f"{clients.asked} answers, of which {clients.ties} parted at a tie")
        clients.check()
        assert clients.ties < clients.asked / 10
        server.check_used()
    half.close()


def test_with_caches_in_which_there_is_hardly_room(
    folder: Path, plain: Plain, every: list[Kind], tmp_path: Path
) -> None:
    bounds = "--image-cache", str(IMAGES), "--prefix-cache", str(PREFIXES)
    with (
        Withheld(tmp_path / "compiled", compiled_steps(folder)) as withheld,
        serving(folder, tmp_path, withheld.folder, *bounds) as server,
    ):
        clients = Clients(server, plain, every)
        clients.across_the_switch(withheld)
        clients.check()
        server.check_used()
        assert 0 < server.metric("image_cache_bytes") <= IMAGES
        assert 0 < server.metric("prefix_cache_bytes") <= PREFIXES
        assert server.metric("image_cache_misses_total") > 40  # of four pictures, in few sizes


def test_with_two_replicas(folder: Path, plain: Plain, every: list[Kind], tmp_path: Path) -> None:
    alone = [kind for kind in every if kind.before is None]  # an earlier answer is known to its own replica
    with (
        Withheld(tmp_path / "compiled", compiled_steps(folder)) as withheld,
        serving(folder, tmp_path, withheld.folder, replicas=2) as server,
    ):
        clients = Clients(server, plain, alone)
        clients.across_the_switch(withheld)
        clients.check()
        server.check_used()
