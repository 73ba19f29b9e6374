"""A server on the GPU answers every kind of request as the plain path on the CPU does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.conftest import DEVICE
from tests.server.served.asking import Clients
from tests.server.served.kinds import kinds
from tests.server.served.model import LAYERS, served_model
from tests.server.served.serving import Plain, serving

pytestmark = pytest.mark.gpu

PHASES = 3
"""Sets of pictures: those of one phase are known in none of the others, but for a few."""


SLOW = pytest.mark.skipif(DEVICE == "cpu", reason="half precision takes a CPU too long")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=SLOW)])
def test_every_answer_is_that_of_the_plain_path(dtype: str, tmp_path: Path) -> None:
    folder, half = served_model(tmp_path / "model"), dtype != "float32"
    plain = Plain(folder, dtype)
    every = kinds(plain.app.extensions["helmsight"].presets.chats, LAYERS, plain.presets)
    options = "--device", DEVICE, "--dtype", dtype
    with serving(folder, tmp_path, tmp_path / "compiled", *options) as server:
        clients = Clients(server, plain, every, half=half, strict=not half)
        for phase in range(PHASES):
            clients.mixed(phase)
        clients.alone(PHASES)
        clients.check()
        assert server.metric("faults_total") == 0
        if DEVICE == "cuda":
            assert server.metric("compiled_steps_total") > 0
    plain.close()
