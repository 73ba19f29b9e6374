"""Clients' measurements of a load on a server whose answers are scripted."""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import drip
from benchmarks.load import overhead, overload, run
from benchmarks.load.client import Load, Outcome, Seen, Server
from benchmarks.load.send import send
from benchmarks.load.workloads import WORKLOADS
from benchmarks.run import BENCHMARKS
from steering import Engine, load
from tests.families import checkpoint
from tests.first_hour.pages import ROOT, blocks, commands

ASKED: list[dict[str, Any]] = []


class Scripted(BaseHTTPRequestHandler):
    """Streams three pieces, or answers whole; refuses every fourth request, and breaks a stream for who asks to."""

    refusals: Sequence[int] = (0,)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if len(content) < int(self.headers["Content-Length"]):  # of one that drips, and was ended
            return
        body = json.loads(content)
        ASKED.append(body)
        self.send_response(429 if len(ASKED) % 4 in self.refusals else 200)
        self.end_headers()
        usage = {"usage": {"completion_tokens": 5}}
        if not body.get("stream"):
            self.wfile.write(json.dumps(usage).encode())
            return
        pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("", "a", "b", "c")]
        events = [*pieces, {"error": {}}] if body.get("breaks") else [*pieces, {"choices": [], **usage}]
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Kept(BaseHTTPRequestHandler):
    """A scripted server that keeps connections and streams in chunks, as servers do.

    Its three pieces follow pauses of 80, 20 and 60 ms; if asked to, it refuses, answers nonsense, or goes in the middle
    of a chunk.
    """

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        super().setup()
        Kept.connections += 1

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append({**body, "key": self.headers["Authorization"]})
        if does := body.get("refuses") or body.get("nonsense"):
            content = b'{"error": {}}' * 1000
            self.send_response(503 if does == "refuses" else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError):  # of who leaves
            for pause in (0.08, 0.02, 0.06):
                time.sleep(pause)
                self._chunk({"choices": [{"delta": {"content": "é" * 3000}}]})
                if body.get("goes"):
                    self.wfile.write(b"ffff\r\ndata: {")
                    self.close_connection = True
                    return
            self._chunk({"choices": [], "usage": {"completion_tokens": 4}})
            self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: dict[str, Any]) -> None:
        content = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()
        thread.join()


@pytest.fixture
def url() -> Iterator[str]:
    with serving(Scripted) as address:
        yield address


@pytest.fixture
def kept() -> Iterator[str]:
    Kept.connections = 0
    with serving(Kept) as address:
        yield address


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """Return the cells of the printed table by column, of columns with one name the first."""
    names, _, *lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) == len(names) for line in lines)
    return [dict(reversed([*zip(names, line, strict=True)])) for line in lines]


def test_times_by_hand() -> None:
    requests = [
        Seen(200, 0.1, [0.01, 0.03], 0.2, 3),
        Seen(200, 0.3, [0.02], 0.4, 5),
        Seen(200, 9.0, left=True),
        Seen(429),
    ]
    outcome = Outcome(requests, 2.0)
    assert outcome.tokens_per_second == 4
    assert outcome.statuses() == {"200": 2, "429": 1, "left": 1}
    assert [outcome.times(name, 50) for name in ("first", "gaps", "total")] == pytest.approx([200, 20, 300])
    assert outcome.times("gaps", 100) == pytest.approx(30)
    assert Outcome([Seen(500)], 1.0).times("first", 50) is None


def test_every_request_is_asked_once_and_seen(url: str) -> None:
    server = Server("a", url, "m", [{}, {"seed": 1}])
    outcome = send(server, Load([{"stream": True, "number": number} for number in range(12)], clients=3))
    assert sorted(body["number"] for body in ASKED) == list(range(12))
    assert all(body.get("seed") == (1 if body["number"] % 2 else None) for body in ASKED)
    assert outcome.statuses() == {"200": 9, "429": 3}
    for request in outcome.whole:
        assert (request.tokens, len(request.gaps)) == (5, 2)
        assert request.first is not None
        assert request.first + sum(request.gaps) <= request.total


def test_requests_that_come_by_rate_do_not_wait_for_one_another(kept: str) -> None:
    load = Load([{"stream": True, "number": number} for number in range(12)], clients=0, rate=100.0)
    draw = random.Random(0)
    outcome = send(Server("a", kept, "m"), load)
    assert sorted(body["number"] for body in ASKED) == list(range(12))
    assert outcome.statuses() == {"200": 12}
    assert sum(draw.expovariate(100.0) for _ in range(12)) <= outcome.seconds
    assert outcome.seconds < sum(request.total for request in outcome.seen) / 2, "one after the other"


def test_a_refused_request_is_repeated(url: str) -> None:
    load = Load([{"stream": True, "number": number} for number in range(12)], clients=1, again=0.0)
    assert send(Server("a", url, "m"), load).statuses() == {"200": 12, "429": 3}
    numbers = [body["number"] for body in ASKED]
    assert numbers[3:5] == [3, 3], "the fourth request is refused"


def test_overload_is_compared_with_one_client(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert overload.main([f"a={url}=m", "--alone", "8", "--clients", "2", "--times", "2", "--seconds", "0.05"]) == 0
    alone, busy, overloaded = rows(capsys)
    assert (alone["load"], alone["answers"]) == ("alone", "6 200, 2 429")
    assert alone["p50 of alone"] == alone["p99 of alone"] == "1.00"
    assert busy["load"] == "2 clients"
    assert busy["answers"].startswith("16 200"), "each was answered in the end"
    assert overloaded["load"] == "2 times as much"


def test_slow_connections_are_counted_by_outcome(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = int(url.split(":")[2].partition("/")[0])
    monkeypatch.setattr(drip, "serving", lambda *flags: nullcontext(SimpleNamespace(port=port)))
    monkeypatch.setattr(Scripted, "refusals", ())
    assert drip.main(["--connections", "3", "--seconds", "0.2"]) == 0
    printed = capsys.readouterr()
    *table, end = [line for line in printed.out.splitlines() if line]
    assert [line.split(" | ")[:2] for line in table[2:]] == [
        [f"| {label}", beside]
        for label in ("`/health`", "first token of a chat", "the whole chat")
        for beside in ("nothing", "3 that drip")
    ]
    for line in table[2:]:
        p50, p99, most, count = map(float, line.strip("| ").split(" | ")[2:])
        assert 0 < p50 <= p99 <= most
        assert count >= 1
    assert end.startswith("3 of them were open at the end")


def test_broken_and_abandoned_requests_are_not_answers(url: str) -> None:
    assert send(Server("a", url, "m"), Load([{"stream": True}], 1, leaving=1.0)).statuses() == {"left": 1}
    assert send(Server("a", url, "m", [{"breaks": True}]), Load([{"stream": True}], 1)).statuses() == {"500": 1}
    assert send(Server("a", "http://127.0.0.1:9/v1", "m"), Load([{}], 1)).statuses() == {"0": 1}


def test_times_are_those_of_the_server(kept: str) -> None:
    outcome = send(Server("a", kept, "m"), Load([{"stream": True}] * 6, clients=2), key="k")
    assert outcome.statuses() == {"200": 6}
    assert [(body["model"], body["key"]) for body in ASKED] == [("m", "Bearer k")] * 6
    assert outcome.tokens_per_second == pytest.approx(24 / outcome.seconds)
    assert 3 * 0.16 <= outcome.seconds < 6 * 0.16, "three of each client, at the same time"
    assert min(request.first or 0.0 for request in outcome.seen) >= 0.08
    assert 80 <= (outcome.times("first", 50) or 0.0) < 140, "of 160, had it come in one piece"
    assert (outcome.times("gaps", 25) or 0.0) < 45 < (outcome.times("gaps", 75) or 0.0)
    assert Kept.connections == 2


def test_a_connection_survives_refusals_and_ends_when_its_user_leaves(kept: str) -> None:
    server = Server("a", kept, "m")
    assert send(server, Load([{"refuses": "refuses"}] * 6, clients=2)).statuses() == {"503": 6}
    assert Kept.connections == 2
    draw = random.Random(0)
    leaves = [draw.random() < 0.5 for _ in range(6)]
    outcome = send(server, Load([{"stream": True}] * 6, clients=1, leaving=0.5))
    assert [request.left for request in outcome.seen] == leaves
    assert outcome.statuses() == {"200": leaves.count(False), "left": leaves.count(True)}
    assert all(request.tokens == 0 for request in outcome.seen if request.left), "they do not wait for the end"
    assert Kept.connections == 3 + sum(leaves[:-1])


def test_a_truncated_answer_is_a_fault_and_a_malformed_one_ends_the_load(kept: str) -> None:
    outcome = send(Server("a", kept, "m"), Load([{"stream": True, "goes": True}, {"stream": True}], 1))
    assert [request.status for request in outcome.seen] == [0, 200]
    assert len(outcome.whole) == 1
    with pytest.raises(json.JSONDecodeError):
        send(Server("a", kept, "m"), Load([{"nonsense": "nonsense"}], 1))


def of_the_page() -> list[list[str]]:
    """Return the commands of the page on benchmarks, as words."""
    page = blocks(ROOT / "benchmarks" / "README.md")
    return [shlex.split(command, comments=True) for block in page for command in commands(block.text)]


def test_the_command_of_locust(kept: str, tmp_path: Path) -> None:
    ((_, *words),) = [words for words in of_the_page() if words[0] == "locust"]
    words[words.index("--host") + 1] = kept
    once = f"--headless --only-summary --run-time 5s --stop-timeout 9 --json-file {tmp_path / 'found'}".split()
    subprocess.run([sys.executable, "-m", "locust", *words, *once], cwd=ROOT, check=True, capture_output=True)
    rows = json.loads((tmp_path / "found.json").read_text())
    counts = {row["method"]: row["num_requests"] for row in rows}
    assert len(ASKED) > 16
    assert counts == {"POST": len(ASKED), "first token": len(ASKED), "between tokens": 2 * len(ASKED)}
    assert len({json.dumps(body["messages"]) for body in ASKED}) == len(ASKED)
    assert {json.dumps(body.get("sage")) for body in ASKED} == {"null", "true"}
    (first,) = [row for row in rows if row["method"] == "first token"]
    assert first["min_response_time"] >= 80


def test_the_table_and_the_file(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [f"plain={url}=m", f"mixed={url}=m"]
    out = tmp_path / "load.json"
    command = [*sides, "--rest", "0", "--fields", "mixed=mixed", "--clients", "2", "--repeats", "1", "--out", str(out)]
    assert run.main(command) == 0
    table = rows(capsys)
    assert [(row["workload"], row["clients, or rate"], row["server"]) for row in table] == [
        ("short", "2", "plain"),
        ("short", "2", "mixed"),
    ]
    written = json.loads(out.read_text())["rows"]
    assert [row["server"]["name"] for row in written] == ["plain", "mixed"]
    assert written[0]["ratio"] == 1
    assert (table[0]["ratio"], table[0]["spread"]) == ("1.000", "1.00 to 1.00")
    for row, figures in zip(table, written, strict=True):
        times = figures["milliseconds"]
        assert [row["first p50 (ms)"], row["total p50 (ms)"]] == [
            f"{times[name][0]:.4g}" for name in ("first", "total")
        ]
    assert {json.dumps(body.get("sage")) for body in ASKED} == {"null", "true"}
    with pytest.raises(SystemExit):
        run.main(["--clients", "x", *sides])


def test_requests_come_at_the_rate_that_is_asked(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "load.json"
    options = ["--rest", "0", "--rates", "40", "--requests", "40", "--repeats", "1", "--out", str(out)]
    began = time.monotonic()
    assert run.main([f"one={url}=m", *options]) == 0
    assert time.monotonic() - began > 0.5  # 40 at 40 a second; they would be answered in a twentieth of it
    assert "| short | 40/s | one |" in capsys.readouterr().out
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["clients"], row["rate"]) == (None, 40)


def test_answers_of_different_lengths_are_as_long_from_every_server(url: str) -> None:
    sides = [f"one={url}=m", f"other={url}=m2"]
    options = ["--rest", "0", "--clients", "2", "--repeats", "1", "--requests", "40"]
    assert run.main([*sides, *options, "--tokens", "5-9"]) == 0
    lengths = [
        {json.dumps(body["messages"]): body["max_tokens"] for body in ASKED if body["model"] == model}
        for model in ("m", "m2")
    ]
    assert lengths[0] == lengths[1]
    assert set(lengths[0].values()) == {5, 6, 7, 8, 9}
    for wrong in ("9-5", "0", "x"):
        with pytest.raises(SystemExit):
            run.main([*sides, *options, "--tokens", wrong])


def test_a_server_is_compared_with_its_engine(
    url: str, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(load(checkpoint("qwen2_vl", root), device="cpu"), slots=2, max_length=512, self_check=False)
    monkeypatch.setattr(overhead, "make_engine", lambda settings: engine)
    options = ["--workloads", "short", "picture", "--clients", "2", "--tokens", "3", "--rest", "0", "--requests", "4"]
    assert overhead.main([f"one={url}=m", *options, "--repeats", "3"]) == 0
    assert engine.stats()["generated_tokens"] == 2 * 4 * 4 * 3
    table = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in table] == [["short", "2"], ["picture", "2"]]
    for *_, alone, served, share, bounds in table:
        least, most = map(float, bounds.split(" to "))
        assert least <= float(share) <= most
        assert least - 0.01 <= int(served) / int(alone) <= most + 0.01


def test_workloads_are_the_same_for_every_server() -> None:
    for name, workload in WORKLOADS.items():
        assert workload(3) == workload(3)
        assert workload(3) != workload(4), name
    assert WORKLOADS["shared"](1)[0] == WORKLOADS["shared"](2)[0]
    for same, pictures in (("same-picture", 1), ("same-album", 4)):
        first, second = (WORKLOADS[same](seed)[0]["content"] for seed in (1, 2))
        assert first[:-1] == second[:-1]
        assert len(first) == pictures + 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["b"], "'b' is not NAME=URL=MODEL"),
        (["b=127.0.0.1=m"], "is not NAME=URL=MODEL"),
        (["--fields", "b={}"], "no server is named b"),
        (["--fields", "a={"], "'{' is not JSON"),
        (["--fields", "a=[1]"], "'[1]' is no object"),
        (["--tokens", "9-3"], "'9-3' is neither a number of tokens"),
    ],
)
def test_invalid_options_are_refused_before_any_request(
    more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main(["a=http://127.0.0.1:1/v1=m", *more])
    assert message in capsys.readouterr().err


def test_the_reason_for_no_answers_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "a=http://127.0.0.1:1/v1=m", "--requests", "2", "--clients", "1", "--repeats", "1", "--rest", "0"
    assert run.main(words) == 1
    assert "a: 2 had no answer: [Errno 111] Connection refused" in capsys.readouterr().err


def test_the_commands_of_the_page_are_read() -> None:
    commands_shown = of_the_page()
    loads = [words[3:] for words in commands_shown if words[1:3] == ["-m", "benchmarks.load.run"]]
    overloads = [words[3:] for words in commands_shown if words[1:3] == ["-m", "benchmarks.load.overload"]]
    alone = [words[3:] for words in commands_shown if words[1:3] == ["-m", "benchmarks.load.overhead"]]
    runs = [words[3:] for words in commands_shown if words[1:3] == ["-m", "benchmarks.run"]]
    assert [len(run._options().parse_args(words).servers) for words in loads] == [1, 2]
    assert [len(overload._options().parse_args(words).servers) for words in overloads] == [1]
    assert [[*overhead._options().parse_args(words).tokens] for words in alone] == [[64]]
    assert set().union(*runs) <= BENCHMARKS.keys()
