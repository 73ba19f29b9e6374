"""The same load on any number of OpenAI-compatible servers, in turns.

    python -m benchmarks.load.run helmsight=http://127.0.0.1:8000/v1=helmsight-demo vllm=http://127.0.0.1:8100/v1=helmsight-demo

Both sides of a ratio are of one run, and repeats alternate between the servers. Answers have as many tokens as requested,
whatever the model says (`ignore_eos`, `min_tokens`). Clients ask again once they are answered, so the faster server gets
more requests; with `--rates` all servers get equally many. `--fields NAME=JSON` adds fields to a server's requests (a list
is taken in turn), so that one server can be compared with itself: plain, and with interventions and readouts. So does
`--protocols NAME=responses`, by which a server is asked the same chats in another protocol.

A soak: `--requests 100000 --repeats 1 --clients 32 --leaving 0.1 --fields helmsight=mixed --workloads picture`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.load.client import Load, Outcome, Server
from benchmarks.load.protocols import PROTOCOLS
from benchmarks.load.send import send
from benchmarks.load.workloads import WORKLOADS

MIXED: list[dict[str, Any]] = [
    {},
    {"steering": {"vector": "modality-preference", "toward": "vision"}},
    {"sage": True, "strict": False},
    {"contrast": {"kind": "vcd"}, "strict": False},
    {"diagnostics": True},
    {"diagnostics": {"include": ["focus", "modality", "decay", "residual", "alarm"]}, "temperature": 1.0},
]
"""The fields that `--fields NAME=mixed` adds to requests with a picture, in turn."""
SHOWN = ("first", "gaps", "total")
COLUMNS = (
    "workload", "clients, or rate", "server", "tokens/s", "ratio", "spread", "first p50 (ms)", "p99", "between p50 (ms)",
    "p99", "total p50 (ms)", "p99", "answers",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where a server answered none."""
    options = (parser := _options()).parse_args(argv)
    servers, fields = options.servers, dict(options.fields)
    if unknown := fields.keys() - {server.name for server in servers}:
        parser.error(f"--fields: no server is named {', '.join(sorted(unknown))}")
    protocols = dict(options.protocols)
    if unknown := protocols.keys() - {server.name for server in servers}:
        parser.error(f"--protocols: no server is named {', '.join(sorted(unknown))}")
    servers = [
        replace(server, fields=fields.get(server.name, server.fields), protocol=protocols.get(server.name, "chat"))
        for server in servers
    ]
    rows: list[dict[str, Any]] = []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    loads = [(0, rate) for rate in options.rates] or [(clients, None) for clients in options.clients]
    for workload in options.workloads:
        for clients, rate in loads:
            outcomes = _compare(servers, options, workload, clients, rate)
            for server in servers:
                settings = {"workload": workload, "clients": clients or None, "rate": rate, "server": asdict(server)}
                row = settings | _figures(outcomes[server.name], outcomes[servers[0].name])
                rows.append(row)
                print(_line(row), flush=True)
                for fault, count in sum((outcome.faults() for outcome in outcomes[server.name]), Counter()).items():
                    print(f"{server.name}: {count} had no answer: {fault}", file=sys.stderr)
    if options.out:
        about = {"command": sys.argv[1:], "processors": os.cpu_count(), "load": os.getloadavg()[0]}
        options.out.write_text(json.dumps({"about": about, "rows": rows}, indent=2) + "\n")
    return int(any(not row["answers"].get("200") for row in rows))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "servers",
        nargs="+",
        type=server_of,
        metavar="NAME=URL=MODEL",
        help="servers; others are compared with the first",
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=list(WORKLOADS), default=["short"], help="the chats: texts of 8 and of 1,200 "
        "words; one behind a system prompt that all have; a picture of its own, or the same one, with a question; four "
        "large pictures and 400 words, or the same four with a question (default: short)",
    )  # fmt: skip
    parser.add_argument(
        "--clients",
        nargs="+",
        type=int,
        default=[1, 4, 16, 64],
        metavar="N",
        help="numbers of concurrent clients (default: 1 4 16 64)",
    )
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[], metavar="R", help="requests a second in place of clients, each at "
        "its time (a Poisson process), whatever the state of the earlier ones",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=lengths_of, default="64", metavar="N", help="tokens of every answer (default: 64), or drawn "
        "from LEAST-MOST: equally long answers that begin together also end together, so clients would ask in step",
    )  # fmt: skip
    parser.add_argument(
        "--requests", type=int, help="requests in each repeat (default: 4 a client, at least 8; 20 seconds of a rate)"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats of each load at each server, in turns (default: 3)"
    )
    parser.add_argument("--whole", action="store_true", help="answers in one piece, not as streams")
    parser.add_argument(
        "--leaving", type=float, default=0.0, metavar="SHARE", help="streams left after their first text"
    )
    parser.add_argument(
        "--rest", type=float, default=2.0, metavar="SECONDS", help="pause between two loads: vLLM's worker spins for "
        "one second after its last answer, on a processor that the other server needs",
    )  # fmt: skip
    parser.add_argument(
        "--fields",
        nargs="+",
        type=named_fields,
        default=[],
        metavar="NAME=JSON",
        help="extra fields of the requests to the server of that name, or 'mixed'",
    )
    parser.add_argument(
        "--protocols",
        nargs="+",
        type=named_protocol,
        default=[],
        metavar="NAME=PROTOCOL",
        help=f"the protocol in which the server of that name is asked: {', '.join(PROTOCOLS)} (default: chat)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def server_of(text: str) -> Server:
    """Parse "NAME=URL=MODEL"; like the parsers below, raise ArgumentTypeError for anything else."""
    name, url, model = [*text.split("=", 2), "", ""][:3]
    if not (name and url.startswith("http") and model):
        raise ArgumentTypeError(f"{text!r} is not NAME=URL=MODEL")
    return Server(name, url.rstrip("/"), model)


def named_fields(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Parse "NAME=" and the input of `fields_of` into a server's name and the extra fields of its requests."""
    name, _, fields = text.partition("=")
    return name, fields_of(fields)


def named_protocol(text: str) -> tuple[str, str]:
    """Parse "NAME=PROTOCOL"."""
    name, _, protocol = text.partition("=")
    if protocol not in PROTOCOLS:
        raise ArgumentTypeError(f"{text!r} is not NAME=PROTOCOL, one of {', '.join(PROTOCOLS)}")
    return name, protocol


def fields_of(text: str) -> list[dict[str, Any]]:
    """Parse the extra fields of requests, in turn: JSON of an object or of a list, or 'mixed'."""
    try:
        parsed = MIXED if text == "mixed" else json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    fields = parsed if isinstance(parsed, list) else [parsed]
    if not fields or not all(isinstance(entry, dict) for entry in fields):
        raise ArgumentTypeError(f"{text!r} is no object, and no list of such")
    return fields


def lengths_of(text: str) -> range:
    """Parse "N" or "LEAST-MOST" into the possible numbers of an answer's tokens."""
    least, _, most = text.partition("-")
    if not (least.isdecimal() and (most or least).isdecimal() and 1 <= int(least) <= int(most or least)):
        raise ArgumentTypeError(f"{text!r} is neither a number of tokens nor LEAST-MOST")
    return range(int(least), int(most or least) + 1)


def shape(tokens: int, stream: bool) -> dict[str, Any]:
    """Return the fields of a request whose answer has `tokens` tokens, whatever the model generates."""
    fields: dict[str, Any] = {
        "max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": stream
    }  # fmt: skip
    return {**fields, "stream_options": {"include_usage": True}} if stream else fields


def body_of(workload: str, seed: int, lengths: Sequence[int], stream: bool) -> dict[str, Any]:
    """Return the request of a seed, which also draws the length of its answer."""
    return {
        "messages": WORKLOADS[workload](seed), **shape(random.Random(f"tokens {seed}").choice(lengths), stream)
    }  # fmt: skip


def _compare(
    servers: Sequence[Server], options: Any, workload: str, clients: int, rate: float | None
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each repeat by server; one request warms each of them up."""
    count = options.requests or max(8, 4 * clients, round(20 * (rate or 0)))
    key = os.environ.get("OPENAI_API_KEY")
    outcomes: dict[str, list[Outcome]] = {server.name: [] for server in servers}
    for repeat in range(-1, options.repeats):
        seeds = range(repeat * count, (repeat + 1) * count) if repeat >= 0 else range(10**6, 10**6 + min(count, 4))
        bodies = [body_of(workload, seed, options.tokens, not options.whole) for seed in seeds]
        for server in servers if repeat % 2 else reversed(servers):
            time.sleep(options.rest)
            outcome = send(server, Load(bodies, clients, options.leaving, rate), key)
            if repeat >= 0:
                outcomes[server.name].append(outcome)
    return outcomes


def _figures(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> dict[str, Any]:
    rates = [outcome.tokens_per_second for outcome in outcomes]
    ratios = [
        rate / reference.tokens_per_second for rate, reference in zip(rates, references, strict=True) if reference.whole
    ]
    every = Outcome(
        [request for outcome in outcomes for request in outcome.seen], sum(outcome.seconds for outcome in outcomes)
    )
    times = {name: [every.times(name, percent) for percent in (50, 99)] for name in SHOWN}
    return {
        "tokens_per_second": statistics.median(rates), "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios, "milliseconds": times, "answers": every.statuses(),
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    ratio, ratios = row["ratio"], row["ratios"]
    times = [value for name in SHOWN for value in row["milliseconds"][name]]
    answers = ", ".join(f"{count} {name}" for name, count in row["answers"].items())
    offered = row["clients"] or f"{row['rate']:g}/s"
    cells = (
        row["workload"], offered, row["server"]["name"], f"{row['tokens_per_second']:.0f}",
        "-" if ratio is None else f"{ratio:.3f}", "-" if ratio is None else f"{min(ratios):.2f} to {max(ratios):.2f}",
        *("-" if value is None else f"{value:.4g}" for value in times), answers,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
