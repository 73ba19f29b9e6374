"""Measure what the plugin costs: `HELMSIGHT_VLLM_ENV=FOLDER PYTHONPATH=.:vllm/tests python -m served.overhead`.

Two compiled servers of a wide model run, one without the plugin; sixteen answers at a time decode on either in turns.
What counts is the CPU time of the processes of the engine, so that other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import requests
import torch

import steering
from served.serving import served
from steering import SteeringVector
from tests import families

ROWS, TOKENS, LENGTH = 16, 96, 24
WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 12, 12]},
}  # fmt: skip
LAYERS = 8
LIMITS = {"loaded": 1.02, "steered": 1.05, "with attention": 1.15}
"""The most that each kind of answers shall cost of those without the plugin."""


def seconds_of(url: str) -> float:
    """Return the CPU seconds that the engine's processes of a server have taken."""
    port = url.rpartition(":")[2].encode()
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        processes[folder.name] = words, fields[3], (int(fields[11]) + int(fields[12])) / 100
    session = next(session for words, session, _ in processes.values() if b"\0--port\0" + port + b"\0" in words)
    return sum(seconds for words, other, seconds in processes.values() if other == session and b"VLLM::" in words)


def completed(url: str, row: int) -> None:
    """Ask vLLM's own route for a completion."""
    ids = [20 + (row + place) % 50 for place in range(LENGTH)]
    body = {"model": "helmsight", "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    requests.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status()


def answered(url: str, row: int, **more: Any) -> None:
    """Ask the plugin's route for an answer."""
    ids = [20 + (row + place) % 50 for place in range(LENGTH)]
    digest = hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()
    prompt = {"ids": ids, "length": LENGTH, "sha256": digest, "classes": [[0, LENGTH]]}
    body = {"prompt": prompt, "sampling": {"max_tokens": TOKENS, "ignore_eos": True}, "stream": False, **more}
    requests.post(f"{url}/v1/helmsight/answer", json=body, timeout=300).raise_for_status()


def measure(url: str, ask: Callable[[int], None], threads: ThreadPoolExecutor) -> float:
    """Return the CPU seconds of sixteen answers."""
    before = seconds_of(url)
    list(threads.map(ask, range(ROWS)))
    return seconds_of(url) - before


def made(folder: Path) -> tuple[Path, SteeringVector]:
    """Return the folder of a wide model, and its vector."""
    built = families.build("qwen2_vl", folder, layers=LAYERS, text=WIDE)
    fingerprint = steering.load(built, device="cpu").fingerprint
    (folder / "vectors").mkdir()
    direction = torch.randn(LAYERS, WIDE["hidden_size"], generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    weights = (torch.ones(LAYERS) for _ in range(3))
    vector = SteeringVector("wide", direction, *weights, tuple(range(LAYERS)), fingerprint)
    vector.save(folder / "vectors" / "wide.safetensors")
    return built, vector


def main() -> None:
    """Print the medians of ratios over all rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flags", default="", help="further arguments of both servers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder, vector = made(Path(work) / "model")
        flags = options.flags.split()
        with (
            served(folder, Path(work), *flags, VLLM_PLUGINS="none") as plain,
            served(folder, Path(work), *flags) as url,
            ThreadPoolExecutor(ROWS) as threads,
        ):
            steer = {"name": "wide", "digest": vector.digest, "scale": 0.1, "layers": [*range(LAYERS)], "classes": [0]}
            steered = {"classes": 1, "vectors": [{**steer, "generated": True}]}
            attention = {"labels": [[0, 10], [1, LENGTH - 10]], "rows": {"question": [[10, LENGTH]]}}
            kinds: dict[str, Callable[[int], None]] = {
                "loaded": lambda row: completed(url, row),
                "steered": lambda row: answered(url, row, steering=steered),
                "with attention": lambda row: answered(url, row, steering=steered, attention=attention),
            }
            ratios: dict[str, list[float]] = {name: [] for name in kinds}
            for number in range(options.rounds + 1):
                first = measure(plain, lambda row: completed(plain, row), threads)
                costs = {name: measure(url, ask, threads) for name, ask in kinds.items()}
                last = measure(plain, lambda row: completed(plain, row), threads)
                if number:  # the first round warms up
                    for name, cost in costs.items():
                        ratios[name].append(cost / ((first + last) / 2))
            print(f"vLLM without the plugin: {1000 * last / TOKENS:.2f} ms of CPU time a step of {ROWS} rows")
            for name, values in ratios.items():
                spread = f"{min(values):.3f} to {max(values):.3f}"
                print(f"{name}: {statistics.median(values):.3f} ({spread}); at most {LIMITS[name]}")


if __name__ == "__main__":
    main()
