"""Attack a default server across its first compile: `python -m tests.server.served.attack --minutes 10`.

Clients mix every kind of request, on pictures that are new and on known ones, and some leave; each answer is held to that of
the plain path, which this process keeps. On loopback alone. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from steering.cpu.start import VARIANTS
from tests.server.fakes import checkpoint
from tests.server.served.asking import Clients
from tests.server.served.kinds import kinds
from tests.server.served.serving import Plain, serving

PHASES = 4
"""Sets of pictures: one that is new in one round is known in a later one."""
TOLERANCE = 2e-4
"""The rounding of the embedded model, whose logits are steep: 5e-5 nats, and one sign in the `gains` of Generate."""


def main(words: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10.0, help="at least, and until the steps are compiled")
    options.add_argument("--most", type=float, default=60.0, help="minutes after which it ends in any case")
    options.add_argument("--model", type=Path, default=checkpoint())
    options.add_argument("server", nargs="*", help="further options of the server, behind --")
    asked = options.parse_args(words)
    torch.set_num_threads(1)
    plain = Plain(asked.model)
    every = kinds(plain.app.extensions["helmsight"].presets.chats, plain.engine.mllm.num_layers, plain.presets)
    place = Path(tempfile.mkdtemp(prefix="helmsight-attack-"))
    with serving(asked.model, place, place / "compiled", *asked.server) as server:
        clients = Clients(server, plain, every, strict=False, tolerance=TOLERANCE)
        began, rounds, told, compiled = time.monotonic(), 0, 0, 0.0
        while (spent := (time.monotonic() - began) / 60) < asked.minutes or compiled < len(VARIANTS):
            if spent > asked.most:
                break
            clients.mixed(rounds // 2 % PHASES)
            rounds += 1
            compiled = server.metric("compiled_in_use")
            counts = f"{clients.asked} answers, {clients.left} clients left, {len(clients.wrong)} different"
            print(f"{spent:5.1f} min: {compiled:.0f} steps compiled, {counts}, {clients.refused} refused", flush=True)
            print(*clients.wrong[told:], sep="\n", end="", flush=True)
            told = len(clients.wrong)
        for name in ("compiled_steps_total", "image_cache_hits_total", "prefix_cache_hits_total", "faults_total"):
            print(name, server.metric(name))
    plain.close()
    print(f"log: {place}/log")
    return int(bool(clients.wrong))


if __name__ == "__main__":
    sys.exit(main())
