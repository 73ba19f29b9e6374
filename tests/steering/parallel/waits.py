"""What the host waits for on a GPU, step by step of each request alone; run as a program, because the devices stay."""

from __future__ import annotations

import json
import sys

import torch

import steering
from tests.steering.parallel import pretend
from tests.steering.parallel.asking import requests


def main() -> None:
    torch.set_num_threads(1)
    pretend.install()
    mllm = steering.load(dtype="float32", device=pretend.NAME)
    engine = steering.Engine(mllm, slots=6, max_length=512, self_check=False)
    found: dict[str, list[list[str]]] = {}
    for name, request in requests(mllm).items():
        completion = engine.submit(request)
        steps = found.setdefault(name, [])
        while not completion.done:
            with pretend.watch() as lines:
                engine.step()
            steps.append(lines)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
