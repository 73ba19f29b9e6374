"""Measures how long a running answer waits for tokens while a long prompt is prefilled: `python -m benchmarks.stall`.

It compares gaps between the tokens of one stream of the wide model, undisturbed and while prompts of 2,000 tokens arrive one
after the other: within the default gap, within three times a step, and in chunks of 1,024 tokens alone. All engines share
one model, and alternate.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import steering
from benchmarks.models import Workload, wide
from steering import Engine, Request, Sampling

Gaps = list[tuple[float, float]]
COLUMNS = (
    "", "alone p50 (ms)", "p99", "beside p50 (ms)", "p99", "p50 / p50", "p99 / p99", "p50 / p50 of CPU time",
    "p99 / p99", "first token of the prompt (s)",
)  # fmt: skip


def gaps(engine: Engine, workload: Workload, prompts: int) -> tuple[Gaps, Gaps, list[float]]:
    """Return the gaps between a stream's tokens, undisturbed and beside prompts, and the prompts' times to the first token.

    All are in seconds; gaps are elapsed and CPU time.
    """
    long = Sampling(max_tokens=1500, ignore_eos=True)
    stream = engine.submit(Request([{"role": "user", "content": "What?"}], long))
    chunks = iter(stream)

    def timed(until: float | None, completion: steering.Completion | None) -> Gaps:
        times, last = [], (time.monotonic(), time.process_time())
        while (until is None or time.monotonic() < until) and (completion is None or completion.first_at is None):
            next(chunks)
            now = time.monotonic(), time.process_time()
            times.append((now[0] - last[0], now[1] - last[1]))
            last = now
        return times

    timed(time.monotonic() + 2, None)
    alone = timed(time.monotonic() + 3, None)
    beside: Gaps = []
    first: list[float] = []
    for seed in range(prompts):
        submitted = time.monotonic()
        completion = engine.submit(Request(workload.messages(seed), Sampling(max_tokens=1)))
        beside += timed(None, completion)
        assert completion.first_at is not None
        first.append(completion.first_at - submitted)
        alone += timed(time.monotonic() + 1, None)
    stream.cancel()
    return alone, beside, first


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=3, help="long prompts beside each stream")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        workload = replace(wide(Path(folder)), images=0, context=1880)
        mllm = steering.load(workload.folder, device="cpu")
        print(f"| {' | '.join(COLUMNS)} |\n|---|{'---:|' * (len(COLUMNS) - 1)}")
        results: dict[str, Any] = {}
        for _ in range(options.repeats):
            for name, gap, stall in (
                ("chunks alone", None, None),
                ("max_gap .1", 0.1, None),
                ("max_stall 3", None, 3.0),
            ):
                engine = Engine(
                    mllm,
                    slots=4,
                    max_length=workload.max_length,
                    max_gap=gap,
                    max_stall=stall,
                    threads=options.threads,
                    self_check=False,
                )
                engine.start()
                measured = results.setdefault(name, [[], [], []])
                for values, more in zip(measured, gaps(engine, workload, options.prompts), strict=True):
                    values.extend(more)
                engine.stop()
        for name, (alone, beside, first) in results.items():
            elapsed, cpu = (
                [np.percentile([gap[clock] for gap in side], (50, 99)) for side in (alone, beside)] for clock in (0, 1)
            )
            times = [f"{value * 1e3:.1f}" for side in elapsed for value in side]
            ratios = [f"{value:.1f}" for sides in (elapsed, cpu) for value in sides[1] / sides[0]]
            print(f"| {' | '.join((name, *times, *ratios, f'{np.median(first):.2f}'))} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
