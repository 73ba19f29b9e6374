"""Processor time, throughput and first token of the same chats in each protocol: `python -m benchmarks.load.dialects`.

A single server answers them in rounds. In each round every protocol has as many chats of the same kind, but of its own, so
that none reads from the cache what another left there; the order of the protocols changes from round to round. The
processor time is that of the server's processes: the worker, which speaks HTTP, and the engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.client import Load, Outcome, Server
from benchmarks.load.protocols import PROTOCOLS
from benchmarks.load.run import body_of, lengths_of
from benchmarks.load.send import send
from benchmarks.load.serving import COMPILED, READY, children, serving
from benchmarks.load.workloads import WORKLOADS

MODEL = "helmsight-demo"
COLUMNS = (
    "workload", "clients", "protocol", "server, ms a request", "worker, ms", "of chat's", "spread", "tokens/s, of chat's",
    "first token, of chat's",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """The cost of a protocol in a round: processor seconds of the server, of them its workers', and the outcome."""

    server: float
    workers: float
    outcome: Outcome


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table."""
    options = _options().parse_args(argv)
    table: list[dict[str, Any]] = []
    with serving(*options.serve.split(), until=(READY, COMPILED)) as server:
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for workload in options.workloads:
            for clients in options.clients:
                rounds = _rounds(server.url, server.pid, options, workload, clients)
                for name in PROTOCOLS:
                    row = figures(rounds[name], rounds["chat"], options.requests)
                    table.append({"workload": workload, "clients": clients, "protocol": name, **row})
                    print(_line(table[-1]), flush=True)
    if options.out:
        about = {"command": sys.argv[1:], "processors": os.cpu_count(), "load": os.getloadavg()[0]}
        options.out.write_text(json.dumps({"about": about, "rows": table}, indent=2) + "\n")
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=["short", "picture"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16, 64], metavar="N")
    parser.add_argument(
        "--tokens", type=lengths_of, default="64", metavar="N", help="tokens of every answer (or LEAST-MOST)"
    )
    parser.add_argument("--requests", type=int, default=128, help="requests in each round and protocol")
    parser.add_argument("--repeats", type=int, default=6, help="rounds that count, after one that does not")
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not as streams")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="further options of helmsight serve")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def _rounds(url: str, master: int, options: Any, workload: str, clients: int) -> dict[str, list[Round]]:
    """Return the rounds of each protocol."""
    rounds: dict[str, list[Round]] = {name: [] for name in PROTOCOLS}
    names = list(PROTOCOLS)
    for repeat in range(-1, options.repeats):
        for place, name in enumerate(names):
            begin = ((repeat + 1) * len(names) + place) * options.requests
            bodies = [
                body_of(workload, seed, options.tokens, not options.whole)
                for seed in range(begin, begin + options.requests)
            ]
            before = processor_seconds(master)
            outcome = send(Server(name, f"{url}/v1", MODEL, protocol=name), Load(bodies, clients))
            time.sleep(0.2)  # the last connections are closed
            after = processor_seconds(master)
            if len(outcome.whole) < options.requests:
                raise RuntimeError(f"{name}: {outcome.statuses()}, {dict(outcome.faults())}")
            if repeat >= 0:
                rounds[name].append(Round(*(late - soon for late, soon in zip(after, before, strict=True)), outcome))
        names = [*names[1:], names[0]]
    return rounds


def processor_seconds(master: int) -> tuple[float, float]:
    """Return the processor time of a server's processes, and that of its workers alone, in seconds."""
    workers = children(master)
    engines = [engine for worker in workers for engine in children(worker)]
    alone = sum(map(_seconds_of, workers))
    return alone + sum(map(_seconds_of, [master, *engines])), alone


def _seconds_of(process: int) -> float:
    # The name in parentheses may have spaces; user and system time are the fields 14 and 15.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(rounds: Sequence[Round], chat: Sequence[Round], requests: int) -> dict[str, Any]:
    """Return the medians of a protocol's rounds, and of their ratios to those of chat completions."""
    pairs = list(zip(rounds, chat, strict=True))
    ratios = [own.server / other.server for own, other in pairs]
    first = [(own.outcome.times("first", 50), other.outcome.times("first", 50)) for own, other in pairs]
    firsts = [own / other for own, other in first if own is not None and other is not None]
    return {
        "server": 1000 * statistics.median(own.server for own in rounds) / requests,
        "workers": 1000 * statistics.median(own.workers for own in rounds) / requests,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "rate": statistics.median(
            own.outcome.tokens_per_second / other.outcome.tokens_per_second for own, other in pairs
        ),
        "first": statistics.median(firsts) if firsts else None,
    }


def _line(row: Mapping[str, Any]) -> str:
    first = "-" if row["first"] is None else f"{row['first']:.3f}"
    cells = (
        row["workload"], row["clients"], row["protocol"], f"{row['server']:.2f}", f"{row['workers']:.2f}",
        f"{row['ratio']:.3f}", f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f}", f"{row['rate']:.3f}", first,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
