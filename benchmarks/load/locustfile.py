"""The same requests with locust's own command, for any time, with its page, its CSV files and its reports.

    locust -f benchmarks/load/locustfile.py --host http://127.0.0.1:8000/v1 --users 16 --spawn-rate 16 --fields mixed

Times to the first token and between tokens are rows of its statistics, which rounds them to two digits, in milliseconds.
"""

from __future__ import annotations

import os
import random
from argparse import ArgumentParser
from itertools import count

from locust import events, task

from benchmarks.load.run import fields_of, shape
from benchmarks.load.users import Client
from benchmarks.load.workloads import WORKLOADS


@events.init_command_line_parser.add_listener
def options(parser: ArgumentParser) -> None:
    """Add this file's options to locust's command."""
    parser.add_argument("--model", default="helmsight-demo")
    parser.add_argument("--workload", choices=list(WORKLOADS), default="short")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--leaving", type=float, default=0.0, help="share of streams left after their first text")
    parser.add_argument("--fields", default="{}", help="extra fields of requests, as JSON, or 'mixed'")


class Chats(Client):
    """A user who asks one chat after the other; no two are the same."""

    numbers = count()
    draw = random.Random(0)

    def on_start(self) -> None:
        super().on_start()
        key = os.environ.get("OPENAI_API_KEY")
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.fields = fields_of(self.environment.parsed_options.fields)

    @task
    def chat(self) -> None:
        options, number = self.environment.parsed_options, next(self.numbers)
        body = {"model": options.model, "messages": WORKLOADS[options.workload](number), **shape(options.tokens, True)}
        self.ask({**body, **self.fields[number % len(self.fields)]}, self.draw.random() < options.leaving, self.headers)
