"""Figures for an operator's planning: `python -m benchmarks.sizing --model FOLDER`.

It prints bytes by token and slot, and pictures and tokens a second by the number of answers at once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

import steering
from benchmarks.models import DEMO
from steering import Request, Sampling
from steering.bench.asking import chat, noise

QUESTION = "What do you see in this picture?"


def request_of(size: int, tokens: int) -> Request:
    """Return a request with a new picture and an answer of `tokens` tokens."""
    return Request(chat(QUESTION, noise((size, size))), Sampling(max_tokens=tokens, ignore_eos=True))


def seconds(engine: steering.Engine, requests: Sequence[Request]) -> float:
    """Return the seconds that the engine takes to answer requests submitted at once."""
    begun = time.perf_counter()
    engine.generate(requests)
    return time.perf_counter() - begun


def rows(engine: steering.Engine, size: int, tokens: int, repeats: int) -> Iterator[tuple[str, str]]:
    """Yield names and values of the figures; speeds are the best of the repeats, as other programs only slow them down."""
    seconds(engine, [request_of(size, 2)])  # the first prompt allocates the slots
    stats = engine.stats()
    slots, length = int(stats["slots"]), stats["kv_max_tokens"] / stats["slots"]
    a_token = stats["kv_bytes"] / stats["kv_max_tokens"]
    yield "keys and values, bytes a token", f"{a_token:,.0f}"
    yield f"keys and values, MiB a slot of {length:,.0f} tokens", f"{a_token * length / 2**20:,.1f}"
    yield "recorded and set, MiB a slot", f"{stats['state_bytes'] / slots / 2**20:,.2f}"
    yield f"all of it for {slots} slots, MiB", f"{(stats['kv_bytes'] + stats['state_bytes']) / 2**20:,.0f}"

    def speed(requests: int, tokens: int) -> float:
        return requests / min(
            seconds(engine, [request_of(size, tokens) for _ in range(requests)]) for _ in range(repeats)
        )

    yield f"pictures of {size} x {size} a second, with their prompts", f"{speed(2 * slots, 1):,.1f}"
    for at_once in sorted({1, min(4, slots), slots}):
        yield f"tokens a second, {at_once} at once", f"{speed(at_once, tokens) * tokens:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one model and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default=str(DEMO), help="checkpoint folder (default: the embedded model)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--size", type=int, default=84, help="width and height of the pictures (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=8)
    arguments = parser.parse_args(argv)
    engine = steering.Engine(
        steering.load(arguments.model, device=arguments.device),
        slots=arguments.slots,
        max_length=arguments.max_length,
        threads=arguments.threads,
        image_cache_bytes=0,  # every picture is encoded
        self_check=False,
    )
    table_rows = list(tqdm(rows(engine, arguments.size, arguments.tokens, arguments.repeats), disable=None))
    print(f"{engine.mllm.name}, {engine.mllm.dtype} on {engine.mllm.device}, {torch.get_num_threads()} CPU threads\n")
    print("| what | how much |\n|---|---:|")
    for label, figure in table_rows:
        print(f"| {label} | {figure} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
