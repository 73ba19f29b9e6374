"""The default server, as `make serve` starts it: every kind of request before its steps are compiled, while they come into
use and afterwards, alone and mixed, is answered as by the plain path alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.served.asking import Clients
from tests.server.served.kinds import Kind, kinds
from tests.server.served.model import LAYERS, served_model
from tests.server.served.serving import Plain, Withheld, compiled_steps, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Plain]:
    path = Plain(folder)
    yield path
    path.close()


@pytest.fixture(scope="module")
def every(plain: Plain) -> list[Kind]:
    return kinds(plain.app.extensions["helmsight"].presets.chats, LAYERS, plain.presets)


def test_every_answer_is_that_of_the_plain_path(folder: Path, plain: Plain, every: list[Kind], tmp_path: Path) -> None:
    withheld = Withheld(tmp_path / "compiled", compiled_steps(folder))
    with serving(folder, tmp_path, withheld.folder) as server:
        clients = Clients(server, plain, every)
        clients.alone(0)
        clients.mixed(0)
        assert server.metrics()["helmsight_compiled_in_use"] == 0
        share = -(-len(every) // len(withheld.names))
        for number, name in enumerate(withheld.names):
            withheld.give(name)
            clients.mixed(1, every[number * share : (number + 1) * share])
        server.wait_for("helmsight_compiled_in_use", number + 1)
        clients.alone(2)
        clients.mixed(2)
        metrics = server.metrics()
    print(clients.asked, clients.left, len(clients.wrong))
    assert not clients.wrong, "\n".join(clients.wrong[:40])
    assert clients.left > 0
    for name in ("compiled_steps_total", "image_cache_hits_total", "prefix_cache_hits_total"):
        assert metrics[f"helmsight_{name}"] > 0, name
    assert metrics["helmsight_engine_resident_memory_bytes"] > 0  # the engine has a process of its own
    assert metrics["helmsight_slots"] == 64
    assert metrics["helmsight_faults_total"] == 0
