"""Measures requests when far more arrive than a server can answer.

    helmsight serve --journal off --no-access-log --max-wait 0.02
    python -m benchmarks.load.overload helmsight=http://127.0.0.1:8000/v1=helmsight-demo

Each server gets, in one run: one client alone; as many as it has slots, which shows its capacity; and ten times as many
requests as it can answer, for `--seconds`, each at its time (a Poisson process), whatever the state of the earlier ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.load.client import Load, Outcome, Server
from benchmarks.load.run import server_of, shape
from benchmarks.load.send import send
from benchmarks.load.workloads import WORKLOADS

AGAIN = 0.1
"""Seconds after which one of many refused clients asks again."""
COLUMNS = (
    "server", "load", "asked/s", "answered/s", "first p50 (ms)", "p99", "p50 of alone", "p99 of alone",
    "refused p50 (ms)", "p99", "answers",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where a server answered none."""
    options = _options().parse_args(argv)
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    answered = [_measure(server, options) for server in options.servers]
    return int(not all(answered))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=server_of, metavar="NAME=URL=MODEL")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="short")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--clients", type=int, default=16, help="clients that keep a server busy: its slots")
    parser.add_argument("--alone", type=int, default=100, help="requests of the single client")
    parser.add_argument("--times", type=float, default=10.0, help="requests a second, as a multiple of its capacity")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of the overload")
    return parser


def _measure(server: Server, options: Any) -> bool:
    """Print the rows of one server; return whether it answered anything under overload."""
    key = os.environ.get("OPENAI_API_KEY")
    seed = iter(range(10**9))

    def outcome(count: int, clients: int, rate: float | None = None) -> Outcome:
        chats = [
            {"messages": WORKLOADS[options.workload](next(seed)), **shape(options.tokens, True)} for _ in range(count)
        ]
        return send(server, Load(chats, clients, rate=rate, again=AGAIN if clients > 1 else None), key)

    outcome(
        2 * options.clients, options.clients
    )  # warm up: memory is allotted, and the server learns the length of answers
    alone = outcome(options.alone, 1)
    print(_line(server, "alone", alone, alone), flush=True)
    busy = outcome(8 * options.clients, options.clients)
    print(_line(server, f"{options.clients} clients", busy, alone), flush=True)
    rate = options.times * len(busy.whole) / busy.seconds
    overloaded = outcome(int(rate * options.seconds), 0, rate)
    print(_line(server, f"{options.times:g} times as much", overloaded, alone), flush=True)
    return bool(overloaded.whole)


def _line(server: Server, load: str, outcome: Outcome, alone: Outcome) -> str:
    first = [(outcome.times("first", percent), alone.times("first", percent)) for percent in (50, 99)]
    refused = [request.total for request in outcome.seen if request.status == 429]
    cells = (
        server.name, load, f"{len(outcome.seen) / outcome.seconds:.0f}", f"{len(outcome.whole) / outcome.seconds:.1f}",
        *("-" if base is None else f"{base:.0f}" for base, _ in first),
        *("-" if here is None or base is None else f"{here / base:.2f}" for here, base in first),
        *(f"{np.percentile(refused, percent) * 1000:.0f}" if refused else "-" for percent in (50, 99)),
        ", ".join(f"{count} {name}" for name, count in outcome.statuses().items()),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
