"""Observing: numbers of served answers are the live ones, what differs is counted and named, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from probes.answering.base import Unanswered
from server.app import create_app
from server.batches.transport import LocalTransport, remote
from server.journal.database import Place as Database
from server.journal.database import open_database
from server.journal.reading.queries import Filters, stream
from server.observe.run import ObserveOptions, ObserveReport, observe
from server.settings import Settings
from tests.server.batches.files import Scripted, completion, failure, read, write
from tests.server.conftest import data_uri, user
from tests.server.observe.exports import READOUTS, exported, live, responded, same
from tests.waiting import PATIENCE, wait_for


def options(folder: Path, **more: Any) -> ObserveOptions:
    return ObserveOptions(**{"answers": folder / "answers.jsonl", "out": folder / "out.jsonl", "quiet": True, **more})


@pytest.fixture(scope="module")
def transport(app: Flask) -> LocalTransport:
    return LocalTransport(app)


@pytest.mark.parametrize(("logprobs", "at_once", "within"), [(True, 1, 1e-6), (False, 4, 1e-5)])
def test_numbers_are_those_of_the_live_answers(
    logprobs: bool, at_once: int, within: float, transport: LocalTransport, tmp_path: Path
) -> None:
    """Answers of all kinds, exported without readouts, are read with the numbers that they had when they were given.

    Live ones are given one by one; a batch of others adds the rounding of its own shapes, to KL in hundreds of nats most.
    """
    bodies, answers = live(transport)
    requests = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in bodies.items()
    ]
    write(tmp_path / "answers.jsonl", [exported(name, answer, logprobs=logprobs) for name, answer in answers.items()])
    report = observe(
        options(
            tmp_path,
            requests=write(tmp_path / "requests.jsonl", requests),
            readouts=READOUTS,
            at_once=at_once,
        ),
        transport,
    )
    rows = {(row["custom_id"], row["choice"]): row for row in read(tmp_path / "out.jsonl")}
    assert len(rows) == len(bodies) + 2
    numbers = 0
    for name, answer in answers.items():
        for number, choice in enumerate(answer["choices"]):
            row = rows[name, number]
            # Sampled texts may be split into other tokens than those that were sampled; then this is said.
            assert row["outcome"] == "read" or name == "several sampled answers", (name, row["reason"])
            assert row["same_prompt"]
            if row["outcome"] == "read":
                numbers += same(row["diagnostics"], choice["diagnostics"], name, within)
    assert numbers > 1000
    assert report.outcomes["read"] >= len(bodies) - 1
    assert report.prompts == 0
    if logprobs:
        assert report.difference is not None
        assert report.difference < 1e-5, "of the log-probability of an unlikely token"


def test_tokens_that_are_known_are_forced_as_they_were(
    transport: LocalTransport, engine: steering.Engine, tmp_path: Path
) -> None:
    """Of two splits of a text the tokenizer's own is assumed; with the numbers of the tokens, the numbers are right."""
    body = {"messages": [user(data_uri(), "What is it?")], "temperature": 0}
    split = [token for letter in "red ball" for token in engine.mllm.tokenizer.encode(letter, add_special_tokens=False)]
    asked = {"logprobs": True, "diagnostics": {"include": ["residual", "focus"]}}
    answer = responded(transport, {**body, **asked, "force": split, "max_tokens": len(split)})
    text, (choice,) = exported("text", answer, logprobs=True), answer["choices"]
    ids, counted = exported("ids", answer, logprobs=True), exported("counted", answer)
    ids["response"]["body"]["choices"][0]["token_ids"] = split
    named = exported("named", answer)
    named["response"]["body"]["choices"][0]["logprobs"] = {
        "content": [{"token": f"token_id:{token}", "logprob": -1.0, "bytes": None} for token in split]
    }
    lines = [{**row, "request": body} for row in (text, ids, counted, named)]
    write(tmp_path / "answers.jsonl", lines)
    report = observe(options(tmp_path, readouts=("residual", "focus")), transport)
    rows = {row["custom_id"]: row for row in read(tmp_path / "out.jsonl")}
    for name in ("ids", "named"):
        assert (rows[name]["outcome"], rows[name]["tokens"]["unmatched"]) == ("read", 0)
        same(rows[name]["diagnostics"], choice["diagnostics"])
    own = engine.mllm.tokenizer.encode("red ball", add_special_tokens=False)
    pieces = {engine.mllm.tokenizer.decode(own[:i]) for i in range(len(own) + 1)}
    assert rows["text"]["outcome"] == rows["counted"]["outcome"] == "unmatched"
    unmatched = rows["text"]["tokens"]
    assert unmatched["served"] == len(split)
    assert 0 < unmatched["unmatched"] <= len(split)
    assert unmatched["named"][0]["token"] in "red ball"
    assert unmatched["named"][0]["token"] not in pieces - {""} or unmatched["named"][0]["index"] > 0
    assert (rows["counted"]["tokens"]["by"], rows["counted"]["tokens"]["unmatched"]) == (
        "count",
        abs(len(split) - len(own)),
    )
    assert (report.outcomes["read"], report.outcomes["unmatched"]) == (2, 2)
    assert report.unmatched == unmatched["unmatched"] + rows["counted"]["tokens"]["unmatched"]


def test_an_answer_that_a_stop_string_ended_is_read_with_it(transport: LocalTransport, tmp_path: Path) -> None:
    """Its tokens were generated and then cut off, and the last state is theirs."""
    body = {"messages": [user(data_uri(), "What colour is it?")], "temperature": 0, "max_tokens": 24}
    whole = responded(transport, body)["choices"][0]["message"]["content"]
    word = whole.split()[1]
    asked = {"diagnostics": {"include": ["residual", "focus"]}, "stop": [f" {word}"]}
    answer = responded(transport, {**body, **asked})
    assert answer["choices"][0]["message"]["content"] == whole.split()[0]
    line = {**exported("a", answer), "request": {**body, "stop": [f" {word}"]}}
    line["response"]["body"]["choices"][0]["stop_reason"] = f" {word}"
    write(tmp_path / "answers.jsonl", [line])
    observe(options(tmp_path, readouts=("residual", "focus")), transport)
    (row,) = read(tmp_path / "out.jsonl")
    assert row["outcome"] == "read", row["reason"]
    same(row["diagnostics"], answer["choices"][0]["diagnostics"])


def test_another_prompt_is_noticed(transport: LocalTransport, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 4}
    line = {**exported("a", responded(transport, body)), "request": {**body, "media_io_kwargs": {"video": {"fps": 1}}}}
    line["response"]["body"]["usage"]["prompt_tokens"] += 3
    write(tmp_path / "answers.jsonl", [line])
    report = observe(options(tmp_path), transport)
    (row,) = read(tmp_path / "out.jsonl")
    assert row["same_prompt"] is False
    assert row["prompt_tokens"]["served"] == row["prompt_tokens"]["here"] + 3
    assert row["ignored"] == ["media_io_kwargs"]
    assert report.prompts == 1


def test_what_cannot_be_read_is_counted_by_its_reason(transport: LocalTransport, tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    good = exported("good", responded(transport, {**body, "max_tokens": 4}))

    def line(name: str, message: Any = None, **more: Any) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(json.dumps({**good, "custom_id": name, "request": body}))
        if message is not None:
            row["response"]["body"]["choices"][0]["message"] = message
        return row | more

    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    write(
        tmp_path / "answers.jsonl",
        [
            line("good"),
            "{",
            line("calls", {"content": None, "tool_calls": calls}),
            line("thought", {"content": "4", "reasoning_content": "2 and 2"}),
            line("empty", {"content": ""}),
            line("lost", request=None),
            line("failed", response={"status_code": 500, "request_id": "r", "body": None}, error="broke"),
            line("refused", request={**body, "chat_template": "{{ messages }}"}),
            line("special", {"content": "a <|im_end|> b"}),
        ],
    )
    report = observe(options(tmp_path), transport)
    assert report.outcomes == {
        "read": 1, "invalid": 1, "tool_calls": 1, "reasoning": 1, "empty": 1, "no_request": 1, "failed": 1, "refused": 2,
    }  # fmt: skip
    reasons = {row["custom_id"]: row["reason"] for row in read(tmp_path / "out.jsonl")}
    assert reasons["failed"] == "broke"
    assert reasons["refused"] == "'chat_template' is not supported by this server."
    assert "special tokens" in reasons["special"]
    assert report.reason == "line 2: The line is no JSON object."


def test_answers_are_in_journal_and_metrics_with_the_ids_that_they_had(
    engine: steering.Engine, settings: Settings, tmp_path: Path
) -> None:
    app = create_app(settings.model_copy(update={"journal": _secret(tmp_path / "journal.db")}), engine=engine)
    transport = LocalTransport(app, "observe")
    body = {"messages": [user(data_uri(), "What colour is it?")], "metadata": {"shop": "9"}}
    asked = {**body, "temperature": 0, "diagnostics": {"include": ["focus", "residual"]}}
    answer = responded(transport, asked)
    line = {**exported("mine", answer), "request": body}
    write(tmp_path / "answers.jsonl", [line])
    metrics = tmp_path / "metrics.prom"
    observe(options(tmp_path, readouts=("focus", "residual"), metrics_file=metrics), transport)
    app.extensions["helmsight"].journal.close()
    database = open_database(Database.of(str(tmp_path / "journal.db")))
    rows = [row for some in stream(database, Filters()) for row in some]
    database.close()
    observed, given = rows
    assert observed["metadata"] == {
        "shop": "9", "observed": "mine", "observed_answer": answer["id"], "observed_choice": "0",
    }  # fmt: skip
    assert observed["asked"]["force"] is True
    assert observed["source"] == "observe"
    same(observed["diagnostics"], given["diagnostics"])
    text = metrics.read_text()
    assert 'helmsight_observed_answers_total{outcome="read"} 1.0' in text
    assert "helmsight_observed_behind_bytes 0.0" in text
    assert f'helmsight_observed_tokens_total{{matched="true"}} {float(answer["usage"]["completion_tokens"])}' in text
    assert 'helmsight_observed_prompts_total{matched="true"} 1.0' in text
    (counts,) = re.findall(r"(?m)^helmsight_focus_share_count\{.*source=\"observe\".*\} (.*)$", text)
    assert float(counts) == 2, "the readouts' own histograms are in the same file"


def _secret(path: Path) -> Any:
    return Settings(journal=str(path)).journal


def lines(count: int, start: int = 0) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    return [
        {"custom_id": f"q{number}", "request": body, "response": completion(f"answer {number}").body}
        for number in range(start, start + count)
    ]


def forced(body: Any) -> Any:
    """Return the answer of a server that forces what it is told to."""
    tokens = [{"token": body["force"], "logprob": -0.5, "bytes": list(body["force"].encode())}]
    return completion(body["force"], logprobs={"content": tokens}, diagnostics=None)


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(20))

    def stops(body: Any) -> Any:
        return failure(503, "draining") if body["force"] == "answer 9" else forced(body)

    with pytest.raises(Unanswered, match="read by the next run"):
        observe(options(tmp_path), Scripted(stops))
    first = [row["custom_id"] for row in read(tmp_path / "out.jsonl")]
    assert first == [f"q{number}" for number in range(9)]
    again = Scripted(forced)
    assert observe(options(tmp_path), again).outcomes == {"read": 11}
    assert [body["force"] for body in again.bodies].count("answer 8") == 0
    assert [row["custom_id"] for row in read(tmp_path / "out.jsonl")] == [f"q{number}" for number in range(20)]
    none = Scripted(forced)
    report = observe(options(tmp_path, out=tmp_path / "other.jsonl"), none)
    assert not report.outcomes
    assert f"continued behind line 20, which an earlier run reached: {tmp_path / 'answers.jsonl.observed'}" in str(
        report
    )
    write(tmp_path / "answers.jsonl", lines(3, start=100))  # another file of this name
    report = observe(options(tmp_path), none)
    assert report.outcomes == {"read": 3}
    assert "continued" not in str(report)


def test_a_killed_run_counts_nothing_twice(tmp_path: Path) -> None:
    """The place may be older than the last rows, which are known by their ids."""
    write(tmp_path / "answers.jsonl", lines(6))
    observe(options(tmp_path), Scripted(forced))
    (tmp_path / "answers.jsonl.observed").unlink()
    again = Scripted(forced)
    assert not observe(options(tmp_path), again).outcomes
    assert not again.bodies
    assert len(read(tmp_path / "out.jsonl")) == 6


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(1))
    (tmp_path / "out.jsonl").write_text("notes\n")
    with pytest.raises(ValueError, match=r"has 1 lines of something else; name another file$"):
        observe(options(tmp_path), Scripted(forced))
    assert (tmp_path / "out.jsonl").read_text() == "notes\n"


def test_a_share_is_the_same_answers_each_time(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(400))
    chosen = []
    for seed in (0, 0, 1):
        transport = Scripted(forced)
        report = observe(
            options(tmp_path, share=0.25, seed=seed, out=None, state=tmp_path / f"{len(chosen)}"), transport
        )
        assert report.left_out + report.outcomes["read"] == 400
        chosen.append({body["force"] for body in transport.bodies})
    assert chosen[0] == chosen[1] != chosen[2]
    assert 70 <= len(chosen[0]) <= 130, "a quarter, within three standard deviations"
    limited = Scripted(forced)
    assert observe(options(tmp_path, limit=5, out=None, state=tmp_path / "l"), limited).outcomes == {"read": 5}
    rest = observe(options(tmp_path, out=None, state=tmp_path / "l"), Scripted(forced))
    assert rest.outcomes == {"read": 395}


def test_a_growing_file_is_followed_through_a_rotation(tmp_path: Path) -> None:
    path, stop = write(tmp_path / "answers.jsonl", lines(2)), threading.Event()
    reports: list[ObserveReport] = []
    follower = threading.Thread(
        target=lambda: reports.append(observe(options(tmp_path, follow=True), Scripted(forced), stop)), daemon=True
    )
    follower.start()

    def seen(count: int) -> None:
        wait_for(lambda: (tmp_path / "out.jsonl").exists() and len(read(tmp_path / "out.jsonl")) >= count)

    seen(2)
    text = "".join(json.dumps(line) + "\n" for line in lines(2, start=2))
    with path.open("a") as file:
        file.write(text[:-30])  # a line that is still being written
        file.flush()
        seen(3)
        time.sleep(0.1)
        file.write(text[-30:])
    seen(4)
    path.rename(tmp_path / "answers.jsonl.1")
    with (tmp_path / "answers.jsonl.1").open("a") as file:  # the writer has not noticed yet
        file.write(json.dumps(lines(1, start=4)[0]) + "\n")
    write(path, lines(2, start=5))
    seen(7)
    stop.set()
    follower.join(PATIENCE)
    assert reports[0].outcomes == {"read": 7}
    assert [row["custom_id"] for row in read(tmp_path / "out.jsonl")] == [f"q{number}" for number in range(7)]
    with path.open("a") as file:
        file.write(json.dumps(lines(1, start=7)[0]) + "\n")
    assert observe(options(tmp_path), Scripted(forced)).outcomes == {"read": 1}


def test_a_slow_rate_does_not_hold_up_the_end(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(3))
    stop = threading.Event()
    transport = Scripted(lambda body: stop.set() or forced(body))
    begun = time.monotonic()
    observe(options(tmp_path, rate=0.01), transport, stop)
    assert time.monotonic() - begun < 90, "and not the hundred seconds until the next one"
    assert 1 <= len(read(tmp_path / "out.jsonl")) <= 2


def test_metrics_are_served_while_it_follows(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(3))
    stop, bound = threading.Event(), []

    def run() -> None:
        from server.observe import metrics

        class Told(metrics.ObservedMetrics):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                bound.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("server.observe.run.ObservedMetrics", Told)
            observe(options(tmp_path, follow=True, metrics_port=0), Scripted(forced), stop)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        wait_for(lambda: bool(bound) and bound[0].answers.labels("read")._value.get() == 3)
        with urllib.request.urlopen(f"http://127.0.0.1:{bound[0].port}/metrics", timeout=PATIENCE) as response:
            text = response.read().decode()
        assert 'helmsight_observed_answers_total{outcome="read"} 3.0' in text
    finally:
        stop.set()
        thread.join(PATIENCE)


def test_a_server_reads_them_too(
    app: Flask, live: Callable[[Flask], str], transport: LocalTransport, tmp_path: Path
) -> None:
    body = {"messages": [user(data_uri(), "What colour is it?")], "temperature": 0}
    answer = responded(transport, {**body, "diagnostics": {"include": ["focus"]}})
    write(tmp_path / "answers.jsonl", [{**exported("a", answer), "request": {**body, "model": "llava-hf/llava-1.5"}}])
    with ExitStack() as opened:
        there = opened.enter_context(remote(live(app), None, 2, 60.0))
        assert observe(options(tmp_path, readouts=("focus",)), there).outcomes == {"read": 1}
        plain = Scripted(forced)
        plain.forces = False
        with pytest.raises(ValueError, match="needs a Helmsight server"):
            observe(options(tmp_path), plain)
    (row,) = read(tmp_path / "out.jsonl")
    same(row["diagnostics"], answer["choices"][0]["diagnostics"])


def test_an_unknown_readout_is_named_at_once(tmp_path: Path) -> None:
    write(tmp_path / "answers.jsonl", lines(1))
    with pytest.raises(ValueError, match=r"unknown readout 'fokus'.*focus"):
        replace(options(tmp_path), readouts=("fokus",)).check()
    assert not os.path.exists(tmp_path / "out.jsonl")
