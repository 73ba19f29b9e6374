"""Compares the engine with transformers and features on with off, both sides in one run: `python -m benchmarks.run [names]`.

The sides alternate and every figure is a ratio of medians over repeats, so that a busy machine disturbs both alike. Beside
the ratio of elapsed times stands that of the process's own CPU times, which waiting for other programs does not change.
`--write` appends the table to HISTORY.md with date, machine and command, and rewrites RESULTS.md. Say in reasons.toml why an
aim is missed; a test asks for it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tqdm import tqdm

from benchmarks import models, sides, waiting
from benchmarks.models import Workload
from benchmarks.results import FOLDER, Row, as_table, keep
from probes.answering.base import Question
from probes.answering.engine import InProcess
from steering import Engine
from steering.bench.asking import pushes

CONCURRENT = 16
ASKED = 64
BUSY = 2
AIMS = {"See": 1.1, "Think": 1.15, "Generate": 2.1, "SAGE": 1.6}
"""The aims of a single request with a stage of SAGE."""
OWN = {"longest": False, "own": True}
KEPT = 512 * 2**20
"""The bytes of the prefix cache, as `serve` has it by default."""

Side = Callable[[Sequence[int]], float | None]
"""A function that runs one prompt for each seed; it returns its CPU seconds where they were spent in another process."""


@dataclass(frozen=True)
class Comparison:
    """Two or more named sides on equal prompts; the figure is time(over) / time(under), wanted at least or at most `aim`.

    `requests` is how many prompts each run answers.
    """

    title: str
    sides: dict[str, Side]
    over: str
    under: str
    aim: float
    at_least: bool = False
    requests: int = 1


def throughput(workload: Workload) -> Iterator[Comparison]:
    """Compare 16 concurrent requests with 16 sequential `generate()` calls."""
    plain = sides.Plain(workload)
    for title, engine in _engines(workload):
        yield Comparison(
            f"{CONCURRENT} sequential generate() / {CONCURRENT} concurrent{title}",
            {"generate()": plain.run, "engine": functools.partial(sides.run_engine, engine, workload)},
            over="generate()", under="engine", aim=8.0, at_least=True, requests=CONCURRENT,
        )  # fmt: skip


def latency(workload: Workload) -> Iterator[Comparison]:
    """Compare a single request with `generate()`."""
    plain = sides.Plain(workload)
    for title, engine in _engines(workload):
        yield Comparison(
            f"one request{title} / generate()",
            {"generate()": plain.run, "engine": functools.partial(sides.run_engine, engine, workload)},
            over="engine", under="generate()", aim=0.9,
        )  # fmt: skip


def _engines(workload: Workload) -> Iterator[tuple[str, Engine]]:
    """Yield the engine as it comes, and with its decode step compiled."""
    yield "", sides.engine(workload, CONCURRENT)
    yield ", compiled", sides.engine(workload, CONCURRENT, compiled=True)


def steering(workload: Workload) -> Iterator[Comparison]:
    """Compare a steered request with one that is not, and 16 different interventions in one batch with none."""
    engine = sides.served(workload, CONCURRENT)
    steers = pushes(engine.mllm, CONCURRENT)
    off: Side = lambda seeds: sides.run_engine(engine, workload, seeds)  # noqa: E731
    on: Side = lambda seeds: sides.run_engine(engine, workload, seeds, steers=steers)  # noqa: E731
    yield Comparison("steering on / off, one request", {"off": off, "on": on}, over="on", under="off", aim=1.02)
    yield Comparison(
        f"{CONCURRENT} different interventions / none", {"off": off, "on": on}, over="on", under="off", aim=1.05,
        requests=CONCURRENT,
    )  # fmt: skip


def diagnostics(workload: Workload) -> Iterator[Comparison]:
    """Compare focus and modality, and all readouts, on with off, beside eager attention's cost.

    The latter is `generate()` with eager attention and `output_attentions` against plain `generate()`.
    """
    engine, plain, eager = sides.served(workload, CONCURRENT), sides.Plain(workload), sides.Plain(workload, "eager")
    yield Comparison(
        "focus + modality on / off, one request",
        {
            "off": lambda seeds: sides.run_engine(engine, workload, seeds),
            "on": lambda seeds: sides.run_engine(engine, workload, seeds, diagnose=sides.FOCUS),
        },
        over="on", under="off", aim=1.03,
    )  # fmt: skip
    yield Comparison(
        "every readout on / off, one request of 100 tokens",
        {
            "off": lambda seeds: sides.run_engine(engine, workload, seeds, tokens=100),
            "on": lambda seeds: sides.run_engine(engine, workload, seeds, tokens=100, diagnose=sides.EVERYTHING),
        },
        over="on", under="off", aim=1.15,
    )  # fmt: skip
    yield Comparison(
        "for comparison: eager output_attentions / generate()",
        {"generate()": plain.run, "eager": lambda seeds: eager.run(seeds, output_attentions=True)},
        over="eager", under="generate()", aim=float("inf"),
    )  # fmt: skip


def sage(workload: Workload) -> Iterator[Comparison]:
    """Compare SAGE's stages, alone and together, with plain decoding: one request and sixteen, whose twins have slots."""
    engine = sides.served(workload, 2 * CONCURRENT)
    off: Side = functools.partial(sides.run_engine, engine, workload)
    for requests in (1, CONCURRENT):
        for name, stages in sides.SAGES.items():
            on: Side = functools.partial(sides.run_engine, engine, workload, sage=stages)
            yield Comparison(
                f"{name} / plain, {requests} at once", {"plain": off, name: on}, over=name, under="plain",
                aim=AIMS[name] if requests == 1 else float("inf"), requests=requests,
            )  # fmt: skip


def grammar(workload: Workload) -> Iterator[Comparison]:
    """Compare answers that must be JSON with free ones; one request and sixteen."""
    engine = sides.engine(workload, CONCURRENT)
    for requests in (1, CONCURRENT):
        yield Comparison(
            f"JSON by grammar / free, {requests} at once",
            {
                "free": functools.partial(sides.run_engine, engine, workload),
                "JSON": functools.partial(sides.run_engine, engine, workload, grammar=sides.TEXTS),
            },
            over="JSON", under="free", aim=1.1, requests=requests,
        )  # fmt: skip


def prefix(workload: Workload) -> Iterator[Comparison]:
    """Compare times to the first token with and without a known prefix.

    A new question on known pictures and context is compared with a new prompt, and new prompts with the prefix cache on with
    those with it off.
    """
    off = sides.engine(workload, CONCURRENT)
    on = sides.engine(workload, CONCURRENT, prefix_cache_bytes=KEPT)
    for suffix, diagnose in (("", None), (" with focus + modality", sides.FOCUS)):
        yield Comparison(
            f"same pictures, new question{suffix} / new prompt, to the first token",
            {
                "new": functools.partial(sides.run_engine, on, workload, tokens=1, diagnose=diagnose),
                "known": sides.SamePictures(on, workload, diagnose).run,
            },
            over="known", under="new", aim=0.25 if workload.name == "wide" else float("inf"),  # other prompts are short
        )  # fmt: skip
    for requests in (1, CONCURRENT):
        yield Comparison(
            f"prefix cache on / off, new prompts, {requests} at once",
            {
                "off": functools.partial(sides.run_engine, off, workload, tokens=1),
                "on": functools.partial(sides.run_engine, on, workload, tokens=1),
            },
            over="on", under="off", aim=1.02, requests=requests,
        )  # fmt: skip


def lengths(workload: Workload) -> Iterator[Comparison]:
    """Compare short prompts beside a long one: every row reads as many columns as the longest has, or its own."""
    engine = sides.engine(workload, CONCURRENT)
    yield Comparison(
        f"columns of the longest / own columns, {CONCURRENT} at once of which one prompt is long",
        {name: functools.partial(sides.run_uneven, engine, workload, own=apart) for name, apart in OWN.items()},
        over="longest", under="own", aim=1.0, at_least=True, requests=CONCURRENT,
    )  # fmt: skip


def evaluation(workload: Workload) -> Iterator[Comparison]:
    """Compare a benchmark's questions as `helmsight eval` asks them with one request at a time."""
    answerer = InProcess(sides.engine(workload, 2 * CONCURRENT))  # as `helmsight eval` has it

    def questions(seeds: Sequence[int]) -> list[Question]:
        return [Question(workload.messages(seed)) for seed in seeds]

    def in_turn(seeds: Sequence[int]) -> None:
        for question in questions(seeds):
            list(answerer.answers([question]))

    def together(seeds: Sequence[int]) -> None:
        list(answerer.answers(questions(seeds)))

    yield Comparison(
        f"{ASKED} questions one at a time / as eval asks them", {"in turn": in_turn, "eval": together},
        over="in turn", under="eval", aim=5.0, at_least=True, requests=ASKED,
    )  # fmt: skip


def spinning(workload: Workload) -> Iterator[Comparison]:
    """Compare OpenMP's ways of waiting: by default, as `helmsight` sets them, and asleep.

    It runs on all cores, alone and beside two busy programs.
    """
    policies = {"default": waiting.default(), "helmsight": waiting.project()}
    policies["passive"] = waiting.default() | waiting.PASSIVE
    with contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(waiting.Answering(environ, CONCURRENT)).run for name, environ in policies.items()
        }
        for loops, beside, aim in ((0, "", 0.95), (BUSY, f" beside {BUSY} busy programs", 1.5)):
            for requests in (1, CONCURRENT):
                with waiting.busy(loops):
                    yield Comparison(
                        f"OpenMP's default wait / helmsight's, {requests} at once{beside}", dict(runs),
                        over="default", under="helmsight", aim=aim, at_least=True, requests=requests,
                    )  # fmt: skip


BENCHMARKS = {
    "throughput": throughput,
    "latency": latency,
    "steering": steering,
    "diagnostics": diagnostics,
    "sage": sage,
    "grammar": grammar,
    "prefix": prefix,
    "lengths": lengths,
    "evaluation": evaluation,
    "spinning": spinning,
}
PEAKS = ("off", "on", "sage", "generate", "eager")


def measure(comparison: Comparison, repeats: int, first_seed: int) -> Row:
    """Run the sides in turn, in reversed order every other time, after one round that does not count.

    A single request is so short that it is repeated four times as often.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in comparison.sides}
    repeats *= 4 if comparison.requests == 1 else 1
    for repeat in range(repeats + 1):
        order = list(comparison.sides)
        seeds = [first_seed + repeat * comparison.requests + i for i in range(comparison.requests)]
        for name in order if repeat % 2 else order[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            elsewhere = comparison.sides[name](seeds)
            spent = time.process_time() - cpu if elsewhere is None else elsewhere
            if repeat:
                times[name].append((time.perf_counter() - wall, spent))
    over, under = times[comparison.over], times[comparison.under]
    single = [a[0] / b[0] for a, b in zip(over, under, strict=True)]
    median = {name: statistics.median(wall for wall, _ in values) for name, values in times.items()}
    cpu_median = {name: statistics.median(cpu for _, cpu in values) for name, values in times.items()}
    aim = f"{'>=' if comparison.at_least else '<='} {comparison.aim:g}" if comparison.aim != float("inf") else "-"
    detail = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in median.items())
    return Row(
        comparison.title,
        median[comparison.over] / median[comparison.under],
        (min(single), max(single)),
        cpu_median[comparison.over] / cpu_median[comparison.under],
        aim,
        detail,
    )


def peak_rows(workload: Workload, threads: int) -> list[Row]:
    """Return rows of the greatest resident memory of processes that answer one prompt: on / off, and eager / generate()."""
    peaks = {}
    for mode in PEAKS:
        command = [sys.executable, "-m", "benchmarks.peak", mode, str(threads), json.dumps(_description(workload))]
        output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=FOLDER.parent).stdout
        peaks[mode] = float(output.split()[-1])
    detail = ", ".join(f"{mode} {megabytes:.0f} MB" for mode, megabytes in peaks.items())
    return [
        Row("peak memory, focus + modality on / off", peaks["on"] / peaks["off"], None, None, "<= 1.05", detail),
        Row("peak memory, SAGE / plain decoding", peaks["sage"] / peaks["off"], None, None, "-", ""),
        Row("for comparison: peak memory, eager / generate()", peaks["eager"] / peaks["generate"], None, None, "-", ""),
    ]


def _description(workload: Workload) -> dict[str, object]:
    return {**workload.__dict__, "folder": str(workload.folder)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the named comparisons (default: all) on both models and print one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join([*BENCHMARKS, 'memory'])} (default: all)")
    parser.add_argument("--models", nargs="+", choices=("demo", "wide"), default=["demo", "wide"])
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="counted rounds (default %(default)s; four times as many of single requests)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of every side (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="append the table to benchmarks/HISTORY.md and make RESULTS.md"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - {*BENCHMARKS, "memory"}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    names = arguments.names or [*BENCHMARKS, "memory"]
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows: list[tuple[str, Row]] = []
    with tempfile.TemporaryDirectory() as folder:
        prepare = {"demo": models.demo, "wide": lambda: models.wide(Path(folder) / "wide", arguments.seed)}
        for model in arguments.models:
            workload = prepare[model]()
            for name in tqdm(names, desc=model, disable=None):
                if name == "memory":
                    rows += [(model, row) for row in peak_rows(workload, arguments.threads)]
                else:
                    for comparison in BENCHMARKS[name](workload):
                        rows.append((model, measure(comparison, arguments.repeats, arguments.seed)))
    table = as_table(rows)
    print(table)
    if arguments.write:
        _keep(table, ["python -m benchmarks.run", *(sys.argv[1:] if argv is None else argv)])
    return 0


def _keep(table: str, command: Sequence[str]) -> None:
    keep(
        table,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=f"{_processor()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        versions=f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}",
        command=" ".join(command),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


if __name__ == "__main__":
    sys.exit(main())
