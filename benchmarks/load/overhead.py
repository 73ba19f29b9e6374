"""The share of its engine's throughput that a server has.

    helmsight serve --journal off --no-access-log
    python -m benchmarks.load.overhead helmsight=http://127.0.0.1:8000/v1=helmsight-demo

The same requests are sent over HTTP, and to a process with nothing but the engine that `helmsight serve` has by default.
Both alternate, with equally many requests at once, the next one as soon as one is answered. The bare engine's prompts are
read in advance, and nobody consumes its tokens. The server adds HTTP, JSON, pictures, prompts and streams, and its clients
use the same processors.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from PIL import Image

from benchmarks.load.client import Load
from benchmarks.load.run import body_of, lengths_of, server_of
from benchmarks.load.send import send
from benchmarks.load.workloads import WORKLOADS, Messages
from server.engine.local import make_engine
from server.settings import Settings
from steering import Engine, Request, Sampling
from steering.front.output_processor import OutputProcessor
from steering.messages.messages import Add

COLUMNS = "workload", "clients", "engine, tokens/s", "server, tokens/s", "of the engine's", "spread"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _options().parse_args(argv)
    server, key = options.server, os.environ.get("OPENAI_API_KEY")
    engine = make_engine(Settings())
    engine.compilation.wait()
    if engine.compilation.state == "failed":
        raise RuntimeError("The engine's steps could not be compiled.")
    engine.start()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for workload in options.workloads:
        for clients in options.clients:
            rates: list[tuple[float, float]] = []
            for repeat in range(-1, options.repeats):
                seeds = range(repeat * options.requests, (repeat + 1) * options.requests)
                bodies = [body_of(workload, seed, options.tokens, not options.whole) for seed in seeds]
                alone = _alone(engine, bodies, clients)
                time.sleep(options.rest)
                served = send(server, Load(bodies, clients), key).tokens_per_second
                time.sleep(options.rest)
                if repeat >= 0:
                    rates.append((alone, served))
            parts = [served / alone for alone, served in rates]
            alone, served = (statistics.median(column) for column in zip(*rates, strict=True))
            cells = workload, clients, f"{alone:.0f}", f"{served:.0f}", f"{statistics.median(parts):.2f}"
            print(f"| {' | '.join(map(str, cells))} | {min(parts):.2f} to {max(parts):.2f} |", flush=True)
    engine.stop()
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=server_of, metavar="NAME=URL=MODEL")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["short", "picture"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument(
        "--tokens", type=lengths_of, default="64", metavar="N", help="tokens of every answer, or LEAST-MOST"
    )
    parser.add_argument("--requests", type=int, default=256, help="requests in each repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not as streams")
    parser.add_argument("--rest", type=float, default=1.0, metavar="SECONDS", help="pause between two loads")
    return parser


def _alone(engine: Engine, bodies: Sequence[Mapping[str, Any]], clients: int) -> float:
    """Return the tokens a second of the engine without a server."""
    requests = [
        Request(_load_pictures(body["messages"]), Sampling(max_tokens=body["max_tokens"], ignore_eos=True))
        for body in bodies
    ]
    prepared = {id(request): engine.processor.prepare(request, 0) for request in requests}
    prepare = engine.processor.prepare

    def lookup(request: Request, number: int, *model: object) -> tuple[Add, OutputProcessor]:
        add, outputs = prepared[id(request)]
        return replace(add, number=number), outputs

    def run(request: Request) -> int:
        with engine.turn() as turn:
            return turn.submit(request).result().completion_tokens

    engine.processor.prepare = lookup  # type: ignore[method-assign]  # a server prepares in another process
    try:
        with ThreadPoolExecutor(clients) as pool:
            begun = time.perf_counter()
            return sum(pool.map(run, requests)) / (time.perf_counter() - begun)
    finally:
        engine.processor.prepare = prepare  # type: ignore[method-assign]


def _load_pictures(chat: Messages) -> Messages:
    """Return a chat with pictures in place of their URLs."""

    def part(part_of_message: dict[str, Any]) -> dict[str, Any]:
        if part_of_message["type"] != "image_url":
            return part_of_message
        content = base64.b64decode(part_of_message["image_url"]["url"].partition(",")[2])
        return {"type": "image", "image": Image.open(io.BytesIO(content)).convert("RGB")}

    return [
        turn if isinstance(turn["content"], str) else {**turn, "content": [*map(part, turn["content"])]}
        for turn in chat
    ]


if __name__ == "__main__":
    sys.exit(main())
