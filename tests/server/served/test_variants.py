"""The same of servers that are not quite the default one: in half precision, and with several replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.served.asking import Clients
from tests.server.served.kinds import Kind
from tests.server.served.serving import Plain, Withheld, compiled_steps, serving

pytestmark = pytest.mark.long


def test_in_half_precision(folder: Path, every: list[Kind], tmp_path: Path) -> None:
    half = Plain(folder, dtype="bfloat16")
    with (
        Withheld(tmp_path / "compiled", compiled_steps(folder, "bfloat16")) as withheld,
        serving(folder, tmp_path, withheld.folder, "--dtype", "bfloat16") as server,
    ):
        clients = Clients(server, half, every, half=True)
        clients.across_the_switch(withheld)
        print(f"{clients.asked} answers, of which {clients.ties} parted at a tie")
        clients.check()
        server.check_used()
    half.close()


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
